"""Loads a model over ranks, this rank's part of it, from a checkpoint of any kind.

A trainyard step of any layout, or a folder of Hugging Face, Meta or Megatron-LM by the readers of
`conversion`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainyard.checkpoint.load import Checkpoint, open_checkpoint, restore
from trainyard.checkpoint.model import WRITERS, check_tensors
from trainyard.checkpoint.model_config import model_config
from trainyard.checkpoint.model_tensors import model_tensors, names_over
from trainyard.checkpoint.shared_load import LoadGroups
from trainyard.conversion.detect import detect, loader_for
from trainyard.conversion.loadable import LoadableSource
from trainyard.conversion.loaders import open_source
from trainyard.conversion.native import CheckpointSource
from trainyard.conversion.tokenizer_files import tokenizer_of
from trainyard.conversion.vocabulary import Adjusted
from trainyard.errors import ConfigError
from trainyard.inference.config import LayoutConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.expected import check_expected
from trainyard.models.families import family_of
from trainyard.models.layout_fit import check_layout_fits
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.device import check_memory, default_dtype
from trainyard.parallel.groups import ALONE, ProcessGroups
from trainyard.parallel.pipeline.partition import arrange
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_fitting

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelOnRanks:
    """A model of which this rank holds a part, and what it takes to talk to it."""

    model: Any
    """A `GPTModel` or `T5Model` in evaluation mode."""
    tokenizer: Tokenizer
    groups: ProcessGroups
    """The ranks that hold the model; data-parallel ones hold copies."""
    url: str
    step: int
    """Training steps of the checkpoint; 0 where it does not say."""
    first_token: int | None
    """Of a T5's decoder, before any output; None for other families."""
    end_token: int
    """That ends an output unless another one is named."""

    @property
    def config(self) -> TransformerConfig:
        """Of the model."""
        config: TransformerConfig = self.model.config
        return config


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint of any kind, opened."""

    checkpoint: Checkpoint | LoadableSource
    config: TransformerConfig
    padded_vocab_size: int
    tokenizer_files: Mapping[str, bytes]
    """Empty without a tokenizer."""


def load_on_ranks(
    url: str,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    layout: LayoutConfig | None = None,
    groups: ProcessGroups = ALONE,
    families: Sequence[str] = WRITERS,
    tokenizer: TokenizerConfig | None = None,
    expect: Sequence[str] = (),
) -> ModelOnRanks:
    """This rank's part of the model of a step folder, of the latest step of a run folder, or of
    another program's folder; all ranks of `groups` call this.

    families: those that can do what is wanted (`check_family`). tokenizer: for a checkpoint without
    one; one that it has must be the same. expect: NAME=VALUE that the model must have. Raises
    ConfigError, which names --load, for a model or tokenizer that does not do, or a model that does
    not fit the layout or the device."""
    parallel = (layout or LayoutConfig()).parallel()
    opened = _open(url, parallel.tensor_model_parallel_size)
    checkpoint, rows = opened.checkpoint, opened.padded_vocab_size
    with checkpoint:
        check_family(url, opened.config, families)
        check_expected(expect, opened.config, f"--load {url}")
        config = _without_capacity(opened.config)
        check_layout_fits(parallel, config, rows)
        found = _tokenizer(url, opened.tokenizer_files, tokenizer, rows)
        _check_rows(url, found, rows)
        first, end = _ends(config, checkpoint, found)
        _check_weights(url, config.num_params(rows), dtype, parallel.model_ranks, device)
        with device, default_dtype(dtype):
            model = _model(config, opened, parallel, groups)
        targets = model_tensors([model])
        names = names_over(groups, targets)
        restore(checkpoint, targets, "model.", names, LoadGroups.of(groups))
    if family_of(config).neighbor_shape is not None and groups.rank == 0:
        log.info("%s: without neighbours, so by its decoder alone", url)
    model.eval().requires_grad_(False)
    return ModelOnRanks(model, found, groups, checkpoint.url, checkpoint.step, first, end)


def _check_weights(
    url: str, num_params: int, dtype: torch.dtype, ranks: int, device: torch.device
) -> None:
    """Refuse weights that do not fit the device of each of this many ranks."""
    check_memory(
        f"--load {url}: the weights of its {num_params:,} parameters take on each rank about",
        num_params * dtype.itemsize / ranks,
        device,
        "take a machine with more, or more ranks with --tensor-model-parallel-size",
    )


def _model(
    config: TransformerConfig, opened: _Opened, parallel: ParallelConfig, groups: ProcessGroups
) -> Any:
    """This rank's part of the model, with weights to be filled."""
    rows, named = opened.padded_vocab_size, opened.checkpoint.config.get("vocab_size")
    return family_of(config).load_class()(
        config,
        rows,
        groups.model_parallel(parallel),
        _part(config.all_layers, parallel.pipeline_model_parallel_size, groups.pp_rank),
        true_vocab_size=min(named, rows) if type(named) is int else rows,
    )


def load_tokenizer(url: str) -> Tokenizer:
    """The tokenizer of a checkpoint of any kind; ConfigError if it has none."""
    opened = _open(url, 1)
    with opened.checkpoint:
        return _tokenizer(url, opened.tokenizer_files, None, opened.padded_vocab_size)


def check_family(url: str, config: TransformerConfig, families: Sequence[str]) -> None:
    """Refuse a model of another family than these: `WRITERS` or `SCORERS`."""
    if config.model_type not in families:
        raise ConfigError(
            f"--load {url} holds a {config.model_type}, which does not predict the next token; "
            f"name a checkpoint of another family ({', '.join(families)})"
        )


def _open(url: str, tp: int) -> _Opened:
    """Opened so that the vocabulary divides by the tensor-parallel ranks."""
    if detect(url) in ("trainyard", None):
        checkpoint = open_checkpoint(url, "--load")
        try:
            config, rows = model_config(checkpoint)
            check_tensors(checkpoint, config, rows)
            files = checkpoint.tokenizer_files()
        except BaseException:
            checkpoint.close()
            raise
        if rows % tp == 0:
            return _Opened(checkpoint, config, rows, files)
        source, loader = CheckpointSource(checkpoint), "trainyard"
    else:
        loader = loader_for(url)
        source = open_source(url, loader)  # type: ignore[assignment]
    try:
        fitted = source
        if source.padded_vocab_size % tp:
            fitted = Adjusted(source, divisible_by=1, tensor_parallel_size=tp)  # type: ignore
        return _Opened(
            LoadableSource(fitted, loader),
            fitted.config,
            fitted.padded_vocab_size,
            source.tokenizer_files(),
        )
    except BaseException:
        source.close()
        raise


def _without_capacity(config: TransformerConfig) -> TransformerConfig:
    """Experts without a limit: which tokens a full one drops depends on the rest of the batch."""
    if config.experts.moe_expert_capacity_factor is None:
        return config
    log.info("--moe-expert-capacity-factor does not apply here: experts take all their tokens")
    unlimited = replace(
        config.experts, moe_expert_capacity_factor=None, moe_pad_expert_input_to_capacity=False
    )
    return replace(config, moe=unlimited)  # type: ignore[call-arg]


def _part(num_layers: int, pp: int, rank: int) -> PipelineStage:
    """The layers of a pipeline rank; earlier ones take the remainder."""
    base, extra = divmod(num_layers, pp)
    counts = [base + (stage < extra) for stage in range(pp)]
    (part,) = arrange(counts, pp)[rank]
    return PipelineStage(part.layers, part.has_embedding, part.has_output)


def _tokenizer(
    url: str, files: Mapping[str, bytes], given: TokenizerConfig | None, rows: int
) -> Tokenizer:
    """The tokenizer of the checkpoint, or the given one if it has none."""
    if not files:
        if given is None:
            raise ConfigError(
                f"--load {url} has no tokenizer that can be read here; stages.evaluate takes one, "
                "and stages.reshard adds one, by --tokenizer-type and the files that the model was "
                "trained with"
            )
        return build_fitting(given, rows)
    own = tokenizer_of(files)
    if given is not None:
        _check_same(url, own, build_fitting(given, rows))
    return own


def _check_rows(url: str, tokenizer: Tokenizer, rows: int) -> None:
    """Refuse a tokenizer with tokens that the model has no rows for."""
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"--load {url} has rows for {rows} tokens, and the tokenizer has "
            f"{tokenizer.vocab_size}; it is not the one that the model was trained with"
        )


def _check_same(url: str, own: Tokenizer, given: Tokenizer) -> None:
    """Refuse another tokenizer than the checkpoint's, by what it makes of a text of all kinds of
    characters: the files of one tokenizer may be written in several ways."""
    sample = (
        "The quick (brown) fox's 1,234 jumps \u2014 na\u00efve \u4f60\u597d\n\n\tdef f(x): return x"
    )
    if own.vocab_size != given.vocab_size or own.encode(sample) != given.encode(sample):
        raise ConfigError(
            f"--load {url} was trained with another tokenizer than that of --tokenizer-type "
            f"({own.vocab_size} tokens, not {given.vocab_size}, or others for the same text); "
            "leave --tokenizer-type and its files out, and the checkpoint's own is used"
        )


def _ends(
    config: TransformerConfig, checkpoint: Checkpoint | LoadableSource, tokenizer: Tokenizer
) -> tuple[int | None, int]:
    """(first token of a T5's decoder, token that ends an output)."""
    if config.model_type != "t5":
        return None, tokenizer.eod
    settings = checkpoint.config.get("generation") or {}
    bos, eos = (getattr(tokenizer, name, None) for name in ("bos", "eos"))
    named = settings.get("decoder_start_token_id", bos)
    first = named if type(named) is int else tokenizer.pad
    if first is None:
        raise ConfigError(
            f"--load {checkpoint.url}: its tokenizer has neither a bos nor a pad token, with one "
            "of which a T5's decoder begins"
        )
    return int(first), tokenizer.eod if eos is None else int(eos)
