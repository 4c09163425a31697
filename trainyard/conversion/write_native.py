"""Writes a source as a trainyard step: every file except the manifest.

    model-....safetensors  optimizer-....safetensors
    index.json  state.json  config.json  tokenizer/

One tensor is in memory at a time. The step records its source. It has no ledger and no state of
random generators, which only trainyard's own runs have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainyard.checkpoint.index import encode_index
from trainyard.checkpoint.plan import PlannedFile, Slice, entries_of, plan_shards
from trainyard.checkpoint.reshard import RESHARDED, OpenFile, whole_slices
from trainyard.checkpoint.safetensors.blocks import Digests
from trainyard.checkpoint.safetensors.file import DTYPES, Sink, write_tensors
from trainyard.checkpoint.steps import CONFIG, INDEX, STATE, TOKENIZER, encode_document
from trainyard.config import digest_relevant
from trainyard.conversion.source import Source, generation_of, model_shapes, refuse_differences
from trainyard.errors import ArtifactError

MOMENTS = ("param", "exp_avg", "exp_avg_sq")
"""Kinds of optimizer states, as in "optimizer.exp_avg.NAME"."""


def check_source(source: Source) -> None:
    """Refuse a source with missing or unexpected tensors, or optimizer states of other shapes.

    A tensor that is not filled would stay random."""
    wanted = model_shapes(source.config, source.padded_vocab_size)
    shapes = {name: spec.shape for name, spec in source.specs.items()}
    weights = {n.removeprefix("model."): s for n, s in shapes.items() if n.startswith("model.")}
    refuse_differences(weights, wanted, source.url, "its model")
    for name, spec in source.specs.items():
        if not DTYPES[spec.dtype].is_floating_point:
            raise ArtifactError(
                f"{source.url}: {name} is {spec.dtype}, but weights are floating point"
            )
    for name in shapes.keys() - {f"model.{weight}" for weight in weights}:
        kind, _, rest = name.removeprefix("optimizer.").partition(".")
        known = name.startswith("optimizer.") and kind in MOMENTS and rest in wanted
        if not known or tuple(shapes[name]) != wanted[rest]:
            raise ArtifactError(
                f"{source.url}: {name} {list(shapes[name])} belongs to no weight of the model"
            )


def write_step_of(
    source: Source,
    loader: str,
    num_shards: int,
    open_file: OpenFile,
    advance: Callable[[int], object] = lambda size_bytes: None,
) -> None:
    """Write every file of the step except its manifest; tensors in `num_shards` files per kind.

    loader: the format of the source, for config.json."""
    check_source(source)
    planned: list[PlannedFile] = []
    for kind in RESHARDED:
        planned += plan_shards(kind, whole_slices(source.specs, kind), num_shards)
    last = LastRead(source)
    digests: dict[str, Digests] = {}
    for file in planned:
        with open_file(file.name) as out:
            digests[file.name] = _write(last, file, out, advance)
    documents = {INDEX: encode_index(entries_of(planned, digests))}
    documents[STATE] = encode_document(state_document(source))
    documents[CONFIG] = encode_document(config_document(source, loader))
    files = {f"{TOKENIZER}/{name}": data for name, data in source.tokenizer_files().items()}
    for name, data in sorted({**documents, **files}.items()):
        with open_file(name) as out:
            out.write(data)


# --- documents ----------------------------------------------------------------------------------


def state_document(source: Source) -> dict[str, Any]:
    """The training position of a source, its schedule if trainyard supports it, its loss scale."""
    document = {
        "step": source.step,
        "consumed_train_samples": source.consumed_train_samples,
        "scheduled_samples": source.consumed_train_samples,
        "num_updates": source.num_updates,
        "ledger_digest": "",
        "stays": True,
    }
    theirs = getattr(source, "scheduler", None)
    if source.step and isinstance(theirs, Mapping) and theirs.keys() >= SCHEDULER:
        document |= {"scheduled_samples": theirs["num_steps"], "schedule": _schedule(theirs)}
    scaler: Mapping[str, Any] = getattr(source, "scaler", {})
    if scaler:  # only an fp16 run with its optimizer's state has one
        document["loss_scaler"] = dict(scaler)
    return document


SCHEDULER = {
    *("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "num_steps"),
    *("start_wd", "end_wd", "wd_incr_style", "wd_incr_steps"),
}
"""Keys of `opt_param_scheduler` in Megatron-LM's checkpoints; its steps count samples, as ours."""


def _schedule(theirs: Mapping[str, Any]) -> dict[str, Any]:
    rate = {
        "max_lr": theirs["max_lr"],
        "min_lr": theirs["min_lr"],
        "warmup_steps": theirs["lr_warmup_steps"],
        "decay_steps": theirs["lr_decay_steps"],
        "style": theirs["lr_decay_style"],
    }
    decay = {
        "start": theirs["start_wd"],
        "end": theirs["end_wd"],
        "style": theirs["wd_incr_style"],
        "steps": theirs["wd_incr_steps"],
    }
    return {"learning_rate": rate, "weight_decay": decay}


def config_document(source: Source, loader: str) -> dict[str, Any]:
    """The configuration that rebuilds the model; trainyard did not train it."""
    document: dict[str, Any] = {
        "model": digest_relevant(source.config),
        "vocab_size": source.vocab_size,
        "padded_vocab_size": source.padded_vocab_size,
        "run": {},
        "inputs": {},
        "converted": {"loader": loader},
    }
    generation: Mapping[str, Any] = generation_of(source)
    return document | ({"generation": dict(generation)} if generation else {})


# --- tensors ------------------------------------------------------------------------------------


class LastRead:
    """Keeps the last tensor read, since a large one is written in several parts."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._name: str | None = None
        self._tensor: torch.Tensor | None = None

    def part(self, item: Slice) -> torch.Tensor:
        """The rows of a tensor that a slice covers."""
        if self._name != item.name or self._tensor is None:
            self._tensor = None  # before the next one is read
            self._tensor = self._source.read(item.name)
            self._name = item.name
        if item.shape == item.global_shape:
            tensor, self._tensor = self._tensor, None
            return tensor
        return self._tensor.narrow(0, item.offset[0], item.shape[0])


def _write(
    last: LastRead, file: PlannedFile, out: Sink, advance: Callable[[int], object]
) -> Digests:
    by_key = {item.key: item for item in file.slices}

    def read(key: str) -> torch.Tensor:
        advance(by_key[key].size_bytes)
        return last.part(by_key[key])

    specs = {key: item.spec for key, item in by_key.items()}
    return write_tensors(out, specs, read, with_digests=True)
