"""Describes a checkpoint from its manifest, index and documents; reads no tensor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainyard.artifacts.store import FileRecord
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.checkpoint.stored_step import StoredStep

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor of the index."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    pieces: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of the manifest."""

    name: str
    size_bytes: int
    digest: str
    pieces: int
    """Tensors in it; 0 for a document."""
    ranks: tuple[int, ...]
    """Ranks whose own states are in it, according to their names."""


@dataclass(frozen=True, slots=True)
class Total:
    """All tensors of a kind and type."""

    kind: str
    dtype: str
    tensors: int
    elements: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Description:
    """A step."""

    url: str
    step: int
    digest: str
    stage: str
    lineage: str
    parameters: int
    """Elements of the weights, including rows that pad the vocabulary."""
    tensors: tuple[TensorRow, ...]
    files: tuple[FileRow, ...]
    totals: tuple[Total, ...]
    training: dict[str, Any]
    """Position and schedule of the run."""
    model: dict[str, Any]
    """Its options and vocabulary sizes; for a model of a user's program, the known ones."""
    run: dict[str, Any]
    """From the manifest, if recorded: how many ranks trained which steps."""

    def document(self) -> dict[str, Any]:
        """The description as a JSON document."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}


def describe(
    checkpoint: StoredStep[Any], matches: Callable[[str], bool] = lambda name: True
) -> Description:
    """The step, with the tensors whose name matches."""
    names = [name for name in checkpoint.names() if matches(name)]
    manifest, config = checkpoint.manifest, checkpoint.config
    return Description(
        url=checkpoint.url,
        step=checkpoint.step,
        digest=checkpoint.digest,
        stage=manifest.stage,
        lineage=manifest.lineage,
        parameters=sum(math.prod(checkpoint.spec(n).shape) for n in checkpoint.names("model.")),
        tensors=tuple(_row(checkpoint, name) for name in names),
        files=tuple(_files(checkpoint)),
        totals=tuple(totals({name: checkpoint.spec(name) for name in names})),
        training=_training(checkpoint),
        model=_model(config),
        run=dict(manifest.run),
    )


def _row(checkpoint: StoredStep[Any], name: str) -> TensorRow:
    entry, spec = checkpoint.index[name], checkpoint.spec(name)
    files = tuple(sorted({piece.file for piece in entry.pieces}))
    return TensorRow(name, spec.dtype, spec.shape, spec.size_bytes, len(entry.pieces), files)


def _files(checkpoint: StoredStep[Any]) -> Iterable[FileRow]:
    pieces: dict[str, int] = defaultdict(int)
    ranks: dict[str, set[int]] = defaultdict(set)
    for name, entry in checkpoint.index.items():
        for piece in entry.pieces:
            pieces[piece.file] += 1
            ranks[piece.file] |= _rank_of(name)
    for record in sorted(checkpoint.manifest.files, key=_by_name):
        own = tuple(sorted(ranks[record.path]))
        yield FileRow(record.path, record.size_bytes, record.digest, pieces[record.path], own)


def _by_name(record: FileRecord) -> str:
    return record.path


def _rank_of(name: str) -> set[int]:
    """The rank of a tensor such as rng.rank3.torch."""
    kind, _, rest = name.partition(".")
    number = rest.partition(".")[0].removeprefix("rank")
    return {int(number)} if kind == "rng" and number.isdecimal() and len(number) < 10 else set()


def totals(specs: Mapping[str, TensorSpec]) -> list[Total]:
    """Tensors by kind and type."""
    groups: dict[tuple[str, str], list[TensorSpec]] = defaultdict(list)
    for name, spec in specs.items():
        groups[kind_of(name), spec.dtype].append(spec)
    return [
        Total(
            kind,
            dtype,
            len(members),
            sum(math.prod(spec.shape) for spec in members),
            sum(spec.size_bytes for spec in members),
        )
        for (kind, dtype), members in sorted(groups.items())
    ]


def kind_of(name: str) -> str:
    """`model`, `rng`, or the optimizer's state, such as `optimizer.exp_avg`."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "optimizer" else parts[0]


def _training(checkpoint: StoredStep[Any]) -> dict[str, Any]:
    """The state, and the consumed tokens if all samples have one length."""
    state = {key: value for key, value in checkpoint.state.items() if key != "format_version"}
    samples, length = state.get("consumed_train_samples"), state.get("seq_length")
    if type(samples) is int and type(length) is int:
        state["tokens"] = samples * length
    return state


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {key: config[key] for key in ("vocab_size", "padded_vocab_size") if key in config}
    options = config.get("model")
    return {**sizes, **options} if isinstance(options, dict) else sizes
