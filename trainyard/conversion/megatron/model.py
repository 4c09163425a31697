"""The model to write as a Megatron-LM checkpoint: from a trainyard checkpoint or any source, with
the requested number of vocabulary rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from trainyard.checkpoint.load import Checkpoint
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.megatron.written_args import args_of
from trainyard.conversion.native import CheckpointSource
from trainyard.conversion.source import Source
from trainyard.conversion.torch_save.write import PLAIN
from trainyard.conversion.vocabulary import Adjusted, has_rows
from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.checkpoint_names import EMBEDDING
from trainyard.parallel.pipeline.partition import Partition

MEGATRON_DIVISOR = 128
"""Default of its --make-vocab-size-divisible-by."""

CHECKPOINT_VERSION = 3.0

OPTIONS_OF_RUN = (
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "lr_decay_style", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "tokenizer_type"),
)
"""Options of the run that have the same names and values in both programs."""

ReadSlice = Callable[[str, Sequence[int], Sequence[int]], Tensor]


@dataclass(frozen=True, slots=True)
class WholeModel:
    """Tensors by our global names, with the state of their run."""

    url: str
    config: TransformerConfig
    vocab_size: int
    """Tokens of the tokenizer; the rows of the embedding if that is not known."""
    rows: int
    """Rows of the embedding to write."""
    step: int
    consumed_train_samples: int
    num_updates: int
    options: Mapping[str, Any]
    """Options of the run; the optimizer's have the same names here and in Megatron-LM."""
    args: Mapping[str, Any]
    """Numbers and strings of Megatron-LM's args, if it trained the model; else empty."""
    scheduler: Mapping[str, Any] | None
    """State of the schedules, as in Megatron-LM's checkpoints."""
    scaler: Mapping[str, Any]
    """State of the loss scale; empty without one."""
    specs: Mapping[str, TensorSpec]
    """Types and shapes to write, by our global names."""
    read_slice: ReadSlice


def whole_model(
    source: Checkpoint | Source,
    tp: int = 1,
    true_vocab_size: int | None = None,
    divisible_by: int | None = None,
) -> WholeModel:
    """The model of a trainyard checkpoint or of a source.

    true_vocab_size: tokens of the tokenizer, to pad the vocabulary again as Megatron-LM does for
    `tp` ranks, to a multiple of `divisible_by * tp`; None: the rows stay. Raises ConfigError if
    `tp` ranks cannot share the rows evenly."""
    if isinstance(source, Checkpoint):
        source = CheckpointSource(source)
    model = _whole(source)
    if true_vocab_size is not None:
        adjusted = Adjusted(
            source,
            true_vocab_size=true_vocab_size,
            divisible_by=divisible_by or _divisor(model),
            tensor_parallel_size=tp,
        )
        model = _adjusted(model, adjusted)
    if model.rows % tp:
        known = f" {model.vocab_size}" if model.vocab_size < model.rows else ""
        raise ConfigError(
            f"a vocabulary of {model.rows} rows must be divisible by {tp} tensor-parallel ranks; "
            f"pad it again with --true-vocab-size{known or ' and the number of tokens'}"
        )
    return model


def args_document(
    model: WholeModel,
    *,
    tp: int,
    split: Partition,
    is_legacy: bool,
    transformer_impl: str,
    ep: int = 1,
    **more: object,
) -> dict[str, Any]:
    """The `args` of Megatron-LM for a checkpoint of this model. more: args of its format."""
    values = args_of(
        model.config,
        padded_vocab_size=model.rows,
        vocab_size=model.vocab_size,
        tp=tp,
        ep=ep,
        split=split,
        is_legacy=is_legacy,
        transformer_impl=transformer_impl,
        dtype=model.specs[f"model.{EMBEDDING}"].dtype,
        source_args=model.args,
    )
    return values | {
        **more,
        "iteration": model.step,
        "consumed_train_samples": model.consumed_train_samples,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        **{name: model.options.get(name) for name in OPTIONS_OF_RUN},
    }


def _whole(source: Source) -> WholeModel:
    if isinstance(source, Adjusted):
        return _adjusted(_whole(source.source), source)
    return _of_checkpoint(source) if isinstance(source, CheckpointSource) else _of_source(source)


def _divisor(model: WholeModel) -> int:
    """The model's divisor, unless it is just its number of rows (`padded_alike`)."""
    own = model.config.make_vocab_size_divisible_by
    return MEGATRON_DIVISOR if own == model.rows else own


def _adjusted(model: WholeModel, adjusted: Adjusted) -> WholeModel:
    """The model with the vocabulary of `adjusted`, from which only tensors with rows are read."""

    def read_slice(name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        if has_rows(name):
            return box_of(adjusted.read(name), offset, extent)
        return model.read_slice(name, offset, extent)

    return replace(
        model,
        config=adjusted.config,
        vocab_size=adjusted.vocab_size,
        rows=adjusted.padded_vocab_size,
        specs={name: adjusted.specs.get(name, spec) for name, spec in model.specs.items()},
        read_slice=read_slice,
    )


def box_of(whole: Tensor, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
    """A box of a tensor, contiguous; of whole rows a view."""
    for dim, (begin, size) in enumerate(zip(offset, extent, strict=True)):
        whole = whole.narrow(dim, begin, size)
    return whole.contiguous()


def _of_checkpoint(source: CheckpointSource) -> WholeModel:
    checkpoint = source.checkpoint
    state = checkpoint.state

    def read_slice(name: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        if has_rows(name):  # the source replaces padding rows, which other programs may score
            return box_of(source.read(name), offset, extent)
        return checkpoint.read_slice(name, offset, extent)

    return replace(
        _of_source(source),
        options=checkpoint.config.get("run") or {},
        args={},
        scheduler=_scheduler(state),
        scaler=state.get("loss_scaler") or {},
        read_slice=read_slice,
    )


def _of_source(source: Source) -> WholeModel:
    scheduler = getattr(source, "scheduler", None)
    args = _plain(getattr(source, "args", {}))
    return WholeModel(
        url=source.url,
        config=source.config,
        vocab_size=source.vocab_size,
        rows=source.padded_vocab_size,
        step=source.step,
        consumed_train_samples=source.consumed_train_samples,
        num_updates=source.num_updates,
        options=args,
        args=args,
        scheduler=_plain(scheduler) if isinstance(scheduler, Mapping) else None,
        scaler=getattr(source, "scaler", {}),
        specs=source.specs,
        read_slice=lambda name, offset, extent: box_of(source.read(name), offset, extent),
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and strings, without objects that the reader only recorded."""
    return {name: v for name, v in values.items() if v is None or type(v) in PLAIN}


def _scheduler(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """`opt_param_scheduler` from the schedules of a `state.json`: steps are samples in both."""
    schedule = state.get("schedule")
    if not isinstance(schedule, Mapping) or "scheduled_samples" not in state:
        return None
    rate, decay = schedule["learning_rate"], schedule["weight_decay"]
    return {
        "max_lr": rate["max_lr"],
        "lr_warmup_steps": rate["warmup_steps"],
        "num_steps": state["scheduled_samples"],
        "lr_decay_style": rate["style"],
        "lr_decay_steps": rate["decay_steps"],
        "min_lr": rate["min_lr"],
        "start_wd": decay["start"],
        "end_wd": decay["end"],
        "wd_incr_style": decay["style"],
        "wd_incr_steps": decay["steps"],
    }
