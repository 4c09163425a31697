"""Loads a model that generates, this rank's part of it, from a checkpoint of any kind.

A trainyard step of any layout, or a folder of Hugging Face, Meta or Megatron-LM by the readers of
`conversion`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from trainyard.checkpoint.load import Checkpoint, open_checkpoint, restore
from trainyard.checkpoint.model import check_tensors, checkpoint_tokenizer
from trainyard.checkpoint.model_config import model_config
from trainyard.checkpoint.model_tensors import model_tensors, names_over
from trainyard.checkpoint.shared_load import LoadGroups
from trainyard.conversion.detect import LABELS, OF_KIND, detect
from trainyard.conversion.loadable import LoadableSource
from trainyard.conversion.loaders import open_source
from trainyard.conversion.tokenizer_files import tokenizer_of
from trainyard.errors import ConfigError
from trainyard.inference.config import GENERATES, LayoutConfig
from trainyard.models.config import TransformerConfig
from trainyard.models.families import family_of
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.parallel.device import check_memory, default_dtype
from trainyard.parallel.groups import ALONE, ProcessGroups
from trainyard.parallel.layout_checks import check_model
from trainyard.parallel.pipeline.partition import partition
from trainyard.tokenizers.base import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generator:
    """A model of which this rank holds a part, and what it takes to talk to it."""

    model: Any
    """A `GPTModel` or `T5Model` in evaluation mode."""
    tokenizer: Tokenizer
    groups: ProcessGroups
    """The ranks that hold the model; data-parallel ones hold copies."""
    url: str
    step: int
    first_token: int | None
    """Of a T5's decoder, before any output; None for other families."""
    end_token: int
    """That ends an output unless another one is named."""

    @property
    def config(self) -> TransformerConfig:
        """Of the model."""
        config: TransformerConfig = self.model.config
        return config


def load_generator(
    url: str,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    layout: LayoutConfig | None = None,
    groups: ProcessGroups = ALONE,
) -> Generator:
    """The model at a URL; all ranks of `groups` call this.

    Raises ConfigError for a model that does not generate, has no tokenizer, or does not fit the
    layout or the device."""
    kind = detect(url) or "trainyard"
    if kind == "trainyard":
        checkpoint = open_checkpoint(url)
        config, rows = model_config(checkpoint)
        with checkpoint:
            check_tensors(checkpoint, config, rows)
            return _load(
                checkpoint,
                config,
                rows,
                checkpoint_tokenizer(checkpoint),
                device,
                dtype,
                layout or LayoutConfig(),
                groups,
            )
    with open_source(url, OF_KIND[kind]) as source:
        loadable = LoadableSource(source, OF_KIND[kind])
        files = source.tokenizer_files()
        if not files:
            raise ConfigError(
                f"--load {url}: {LABELS[kind]} without a tokenizer that can be read here; convert "
                "it with stages.reshard, which takes --tokenizer-type and the files"
            )
        return _load(
            loadable,
            source.config,
            source.padded_vocab_size,
            tokenizer_of(files),
            device,
            dtype,
            layout or LayoutConfig(),
            groups,
        )


def _load(
    checkpoint: Checkpoint | LoadableSource,
    config: TransformerConfig,
    padded_vocab_size: int,
    tokenizer: Tokenizer,
    device: torch.device,
    dtype: torch.dtype,
    layout: LayoutConfig,
    groups: ProcessGroups,
) -> Generator:
    url = checkpoint.url
    if config.model_type not in GENERATES:
        raise ConfigError(
            f"--load {url} holds a {config.model_type}, which does not generate text; name a "
            f"{', '.join(GENERATES)}"
        )
    config = without_capacity(config)
    parallel = layout.parallel()
    check_model(
        parallel,
        num_layers=config.all_layers,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        ffn_hidden_size=config.ffn_size,
        seq_length=config.seq_length,
        padded_vocab_size=padded_vocab_size,
    )
    count = config.num_params(padded_vocab_size)
    check_memory(
        f"--load {url}: the weights of its {count:,} parameters take",
        count * dtype.itemsize / parallel.model_ranks,
        device,
        "take a machine with more, or more ranks of --tensor-model-parallel-size",
    )
    (part,) = partition(parallel, config.all_layers)[groups.pp_rank]
    found = checkpoint.config.get("vocab_size")
    tokens = min(found, padded_vocab_size) if type(found) is int else padded_vocab_size
    with device, default_dtype(dtype):
        model = family_of(config).load_class()(
            config,
            padded_vocab_size,
            groups.model_parallel(parallel),
            PipelineStage(part.layers, part.has_embedding, part.has_output),
            true_vocab_size=tokens,
        )
    targets = model_tensors([model])
    names = names_over(groups, targets)
    restore(checkpoint, targets, "model.", names, LoadGroups.of(groups))
    model.eval().requires_grad_(False)
    first, end = _ends(config, checkpoint, tokenizer)
    return Generator(model, tokenizer, groups, url, checkpoint.step, first, end)


def without_capacity(config: TransformerConfig) -> TransformerConfig:
    """The model whose experts drop nothing: which tokens find room would depend on the batch."""
    if config.experts.moe_expert_capacity_factor is None:
        return config
    log.warning(
        "--moe-expert-capacity-factor %s does not apply to generation: no expert drops tokens",
        config.experts.moe_expert_capacity_factor,
    )
    free = replace(
        config.experts, moe_expert_capacity_factor=None, moe_pad_expert_input_to_capacity=False
    )
    return replace(config, moe=free)  # type: ignore[call-arg]


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
