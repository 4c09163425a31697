"""Loads a model for an evaluation: from any checkpoint, any part of it on any rank, in fp32."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from trainyard.artifacts.digest import digest_bytes, digest_document
from trainyard.checkpoint.layout import LocalTensors, ShardedTensor
from trainyard.checkpoint.load import Restorable, open_checkpoint, restore
from trainyard.checkpoint.model import SCORERS
from trainyard.checkpoint.model_config import model_config
from trainyard.checkpoint.model_tensors import names_over
from trainyard.checkpoint.shared_load import LoadGroups
from trainyard.conversion.detect import detect, loader_for
from trainyard.conversion.loadable import LoadableSource
from trainyard.conversion.loaders import open_source
from trainyard.conversion.native import CheckpointSource
from trainyard.conversion.tokenizer_files import tokenizer_of
from trainyard.conversion.vocabulary import Adjusted
from trainyard.errors import ConfigError
from trainyard.evaluation.config import LayoutConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.expected import check_expected
from trainyard.models.families import family_of
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.models.tied import copy_of
from trainyard.parallel.comm_errors import communication_errors
from trainyard.parallel.device import check_memory, resolve_device
from trainyard.parallel.dims import dims_of
from trainyard.parallel.groups import (
    ProcessGroups,
    build_groups,
    process_groups,
    rank_of_environment,
)
from trainyard.parallel.layout_checks import check_model
from trainyard.parallel.pipeline.partition import arrange
from trainyard.parallel.sharding import shard_of
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.tokenizers.registry import build_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model, or the part of it on this rank, with what identifies it."""

    model: GPTModel
    """In evaluation mode."""
    config: TransformerConfig
    tokenizer: Tokenizer
    step: int
    """Training steps of the checkpoint; 0 where it does not say."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint of any kind, opened."""

    checkpoint: Restorable
    config: TransformerConfig
    padded_vocab_size: int
    files: Mapping[str, bytes]
    """Of its tokenizer; empty without one."""


@contextmanager
def evaluation_ranks(
    layout: LayoutConfig, device: str
) -> Iterator[tuple[ProcessGroups, torch.device]]:
    """The groups and the device of this rank, within the context. Uses an existing default group,
    and leaves it initialised."""
    rank, world_size, local_rank, local_ranks = rank_of_environment()
    where = resolve_device(device, local_rank)
    if local_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    parallel = layout.parallel()
    with communication_errors(rank, world_size):
        if not dist.is_initialized():
            with process_groups(parallel, where) as groups:
                yield groups, where
            return
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        dims = dims_of(parallel, dist.get_world_size())
        yield build_groups(dims, dist.get_rank(), timeout), where


def load_for_evaluation(
    url: str,
    *,
    groups: ProcessGroups,
    device: torch.device,
    layout: LayoutConfig | None = None,
    tokenizer: TokenizerConfig | None = None,
    expect: Sequence[str] = (),
) -> EvaluatedModel:
    """This rank's part of the model of a step folder, of the latest step of a run folder, or of a
    folder of Hugging Face, Meta or Megatron-LM.

    tokenizer: for a checkpoint without one; one that it has must be the same. expect: NAME=VALUE
    that the model must have. Raises ConfigError, which names --load, for a model that does not
    predict the next token, or that the layout does not divide."""
    tp = groups.dims.tp
    opened = _open(url, tp)
    try:
        config = _without_capacity(opened.config)
        if config.model_type not in SCORERS:
            raise ConfigError(
                f"--load {url} holds a {config.model_type}, and this needs a {SCORERS[0]}, which "
                "predicts the next token; name another checkpoint"
            )
        check_expected(expect, config, f"--load {url}")
        _check_layout(config, opened.padded_vocab_size, layout or LayoutConfig())
        found = _tokenizer(url, opened.files, tokenizer)
        document = opened.checkpoint.config
        tokens = min(
            int(document.get("vocab_size", opened.padded_vocab_size)), opened.padded_vocab_size
        )
        if found.vocab_size > opened.padded_vocab_size:
            raise ConfigError(
                f"--load {url} has rows for {opened.padded_vocab_size} tokens, and the tokenizer "
                f"has {found.vocab_size}; it is not the one that the model was trained with"
            )
        model = _built(url, config, opened.padded_vocab_size, tokens, groups, device, layout)
        _fill(model, opened.checkpoint, groups)
    finally:
        opened.checkpoint.close()  # type: ignore[attr-defined]
    if family_of(config).neighbor_shape is not None and groups.rank == 0:
        log.info("%s: without neighbours, so by its decoder alone", url)
    return EvaluatedModel(model, config, found, opened.checkpoint.step)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Digest of all files that rebuild a tokenizer."""
    files = {name: digest_bytes(data) for name, data in sorted(tokenizer.files().items())}
    return digest_document(files)


def _open(url: str, tp: int) -> _Opened:
    """Opened so that the vocabulary divides by the tensor-parallel ranks."""
    if detect(url) in ("trainyard", None):
        checkpoint = open_checkpoint(url, "--load")
        config, rows = model_config(checkpoint)
        if rows % tp == 0:
            return _Opened(checkpoint, config, rows, checkpoint.tokenizer_files())
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
    if not isinstance(config, GPTConfig) or config.moe.moe_expert_capacity_factor is None:
        return config
    log.info("--moe-expert-capacity-factor does not apply here: experts take all their tokens")
    unlimited = replace(
        config.moe, moe_expert_capacity_factor=None, moe_pad_expert_input_to_capacity=False
    )
    return replace(config, moe=unlimited)


def _check_layout(config: TransformerConfig, padded_vocab_size: int, layout: LayoutConfig) -> None:
    parallel, pp = layout.parallel(), layout.pipeline_model_parallel_size
    config.check_parallel(parallel)
    if pp > config.all_layers:
        raise ConfigError(
            f"--pipeline-model-parallel-size {pp} is more than the {config.all_layers} layers of "
            "the model; give at most that"
        )
    check_model(
        replace(parallel, pipeline_model_parallel_size=1),  # `_part` takes any number of layers
        num_layers=config.all_layers,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        ffn_hidden_size=config.ffn_size,
        seq_length=config.seq_length,
        padded_vocab_size=padded_vocab_size,
    )


def _part(num_layers: int, pp: int, rank: int) -> PipelineStage:
    """The layers of a pipeline rank; earlier ones take the remainder."""
    base, extra = divmod(num_layers, pp)
    counts = [base + (stage < extra) for stage in range(pp)]
    (part,) = arrange(counts, pp)[rank]
    return PipelineStage(part.layers, part.has_embedding, part.has_output)


def _tokenizer(url: str, files: Mapping[str, bytes], given: TokenizerConfig | None) -> Tokenizer:
    """The tokenizer of the checkpoint, or the given one if it has none."""
    if not files:
        if given is None:
            raise ConfigError(
                f"--load {url} has no tokenizer; give --tokenizer-type and the files that its "
                "model was trained with"
            )
        return build_tokenizer(given)
    own = tokenizer_of(files)
    if given is not None:
        _check_same(url, own, build_tokenizer(given))
    return own


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


# --- weights ------------------------------------------------------------------------------------


def _built(
    url: str,
    config: TransformerConfig,
    padded_vocab_size: int,
    num_tokens: int,
    groups: ProcessGroups,
    device: torch.device,
    layout: LayoutConfig | None,
) -> GPTModel:
    """The part of this rank, unfilled."""
    parallel = (layout or LayoutConfig()).parallel()
    count = config.num_params(padded_vocab_size)
    check_memory(
        f"--load {url}: the weights of its {count:,} parameters take on each rank about",
        count * 4 / (groups.dims.tp * groups.dims.pp),
        device,
        "take a machine with more, or more ranks with --tensor-model-parallel-size",
    )
    with device:
        model: GPTModel = family_of(config).load_class()(
            config,
            padded_vocab_size,
            groups.model_parallel(parallel),
            _part(config.all_layers, groups.dims.pp, groups.pp_rank),
            num_tokens,
        )
    return model.eval()


def _fill(model: GPTModel, checkpoint: Restorable, groups: ProcessGroups) -> None:
    """Read this rank's part of every weight; ArtifactError for one that no rank has."""
    targets: dict[str, LocalTensors] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        whole = f"model.{copy_of(tensor) or name}"
        shard, values = shard_of(tensor), tensor.detach()
        targets.setdefault(
            whole,
            values
            if shard is None
            else [ShardedTensor(whole, values[i], shard.shape, o) for o, i in shard.boxes()],
        )
    restore(checkpoint, targets, "model.", names_over(groups, targets), LoadGroups.of(groups))
