"""The content of a checkpoint as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from trainyard.artifacts.digest import SHORT
from trainyard.charts.text_table import first_rows, text_table
from trainyard.checkpoint.describe import Description
from trainyard.config import differing
from trainyard.errors import ConfigError
from trainyard.models.families import read_model_config

SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
"""Options that are always shown; the others are shown when they differ from their defaults."""

COUNTS = ("consumed_train_samples", "tokens", "num_updates", "global_batch_size")


FILE_HEAD = ("file", "bytes", "digest", "pieces", "of ranks")


def description_table(description: Description, max_rows: int) -> str:
    """Facts, tensors, totals, files."""
    tensors = [
        (t.name, t.dtype, _shape(t.shape), f"{t.size_bytes:,}", str(t.pieces), _files(t.files))
        for t in description.tensors
    ]
    shown, more = first_rows(tensors, max_rows)
    head = ("tensor", "type", "shape", "bytes", "pieces", "in")
    sections = [
        text_table([(label, value) for label, value in _facts(description)], left=(0, 1)),
        [*text_table([head, *shown], left=(0, 1, 2, 5)), *more],
        text_table(
            [("kind", "type", "tensors", "elements", "bytes"), *_totals(description)], (0, 1)
        ),
        text_table([FILE_HEAD, *_file_rows(description)], left=(0, 2, 4)),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _facts(description: Description) -> Iterator[tuple[str, str]]:
    yield "checkpoint", description.url
    yield "digest", description.digest
    yield "written by", f"{description.stage}, run {description.lineage[:SHORT]}"
    yield "training", _training(description)
    yield from (("ranks", text) for text in _ranks(description.run))
    yield "model", _model(description.model)
    yield "parameters", f"{description.parameters:,}"


def _training(description: Description) -> str:
    values = description.training
    known = (key for key in COUNTS if type(values.get(key)) is int)
    counts = [f"{key.replace('_', ' ')} {values[key]:,}" for key in known]
    return ", ".join([f"step {description.step:,}", *counts])


def _ranks(run: dict[str, Any]) -> Iterator[str]:
    """The layouts of the steps so far. The document may come from any program."""
    spans = run.get("spans")
    for span in spans if isinstance(spans, list) else ():
        if isinstance(span, dict):
            facts = (f"{key.replace('_', ' ')} {shown(value)}" for key, value in span.items())
            yield ", ".join(facts)


def _model(model: dict[str, Any]) -> str:
    options = {key: value for key, value in model.items() if not key.endswith("vocab_size")}
    try:
        changed = differing(read_model_config(options, "model"))
    except ConfigError:  # another family or version
        changed = options
    names = [*(name for name in SIZES if name in changed), *changed]
    parts = [f"{name.replace('_', ' ')} {shown(changed[name])}" for name in dict.fromkeys(names)]
    sizes = (key for key in ("vocab_size", "padded_vocab_size") if key in model)
    parts += [f"{key.replace('_', ' ')} {shown(model[key])}" for key in sizes]
    return ", ".join(parts) or "unknown"


def _totals(description: Description) -> Iterator[tuple[str, ...]]:
    for t in description.totals:
        yield t.kind, t.dtype, f"{t.tensors:,}", f"{t.elements:,}", f"{t.size_bytes:,}"
    tensors, elements = (
        sum(getattr(t, n) for t in description.totals) for n in ("tensors", "elements")
    )
    size = sum(t.size_bytes for t in description.totals)
    yield "all", "", f"{tensors:,}", f"{elements:,}", f"{size:,}"


def _file_rows(description: Description) -> Iterator[tuple[str, ...]]:
    for f in description.files:
        ranks = ", ".join(map(str, f.ranks))
        yield shown(f.name), f"{f.size_bytes:,}", f.digest[:SHORT], str(f.pieces or ""), ranks


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _files(files: tuple[str, ...]) -> str:
    return files[0] if len(files) == 1 else f"{len(files)} files"


def shown(value: Any) -> str:
    """Any value of a document as one printable line of at most 80 characters."""
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
