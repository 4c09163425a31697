"""Translates names of parameters between Megatron-LM's checkpoints and ours, both ways.

The tables are in `checkpoint_names.py` of `models/gpt` and `models/bert`. Our names are those of a
core GPTModel or BertModel with the local layer. A `core` checkpoint may also have the names of
Transformer Engine's layer, which keeps a norm inside the matrix that follows it. `legacy` is the
older model class, whose names differ, some in several spellings. Layers are numbered from 0 on
every pipeline stage. Names are dotted paths, the keys of nested dicts joined."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from trainyard.models.bert.checkpoint_names import (
    HEADS,
    HEADS_IN_ORDER,
    LEGACY_HEADS,
    LEGACY_HEADS_READ,
)
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.checkpoint_names import (
    ENGINE,
    FINAL_NORM,
    LEGACY,
    LEGACY_READ,
    OUTPUT,
    REGISTRATION_ORDER,
)

ModelClass = Literal["core", "legacy"]
TransformerImpl = Literal["transformer_engine", "local"]

TIED_COPY = "tied copy"
"""Stands for a name of ours: the output layer of a last stage that repeats the tied embedding."""

OURS_LAYER = re.compile(r"(?:de|en)coder\.layers\.(\d{1,9})\.(.+)", re.ASCII)
"""Of a GPT and of a BERT. The part before the number is `stack_of(name)`."""

TABLES = ("word", "position", "tokentype")
"""Of the embedding, in the order of the files."""

LEGACY_ROOT = "language_model."
LEGACY_ENCODER = re.compile(r"language_model\.(?:encoder|transformer)\.(?:transformer\.)?(.+)")
LEGACY_EMBEDDING = re.compile(
    r"language_model\.embedding\.(word|position|tokentype)_embeddings\.weight"
)
LEGACY_FINAL = re.compile(r"final_(?:norm|layernorm)\.(weight|bias)")
LEGACY_COPY = "word_embeddings_for_head.weight"


def flatten(model: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every leaf of nested dicts, in their order."""
    for key, value in model.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def stack_of(name: str) -> str:
    """`decoder.layers.` of a GPT, `encoder.layers.` of a BERT."""
    return f"{name.partition('.')[0]}.layers."


# --- theirs to ours ---------------------------------------------------------------------------


def is_bert(paths: Iterator[str] | list[str]) -> bool:
    """Whether these are names of the last stage of a BERT, of either class."""
    return any(path.startswith("lm_head.dense.") for path in paths)


def is_legacy(paths: Iterator[str] | list[str]) -> bool:
    """Whether these are names of the legacy class."""
    return any(path.startswith(LEGACY_ROOT) for path in paths)


def is_state_of_engine(path: str) -> bool:
    """Whether it is Transformer Engine's extra state, such as FP8 scales, and no weight."""
    return path.endswith("._extra_state") or "._extra_state." in path


def our_name(path: str, *, tied: bool, bert: bool = False) -> str | None:
    """Our name, with the layer's number on its stage; TIED_COPY; None for an unknown path."""
    if bert:
        for theirs, ours in LEGACY_HEADS_READ.items():
            if path.startswith(theirs):
                return ours + path.removeprefix(theirs)
    if path.startswith(LEGACY_ROOT) or path == LEGACY_COPY:
        return _of_legacy(path, "encoder." if bert else "decoder.")
    if path == OUTPUT:
        return TIED_COPY if tied else OUTPUT
    match = OURS_LAYER.fullmatch(path)
    if match is None:
        known = HEADS if bert else (FINAL_NORM,)
        return path if path.startswith(("embedding.", *known)) else None
    if path.startswith("encoder.") != bert:
        return None
    number, rest = match.groups()
    for theirs, ours in ENGINE.items():
        if rest.startswith(theirs):
            return f"{stack_of(path)}{number}.{ours}{rest.removeprefix(theirs)}"
    return path


def _of_legacy(path: str, stack: str) -> str | None:
    if path == LEGACY_COPY:
        return TIED_COPY
    if path == f"{LEGACY_ROOT}{OUTPUT}":
        return OUTPUT
    if match := LEGACY_EMBEDDING.fullmatch(path):
        return f"embedding.{match[1]}_embeddings.weight"
    encoder = LEGACY_ENCODER.fullmatch(path)
    if encoder is None:
        return None
    if match := LEGACY_FINAL.fullmatch(encoder[1]):
        return f"{stack}final_layernorm.{match[1]}"
    layer = re.fullmatch(r"layers\.(\d{1,9})\.(.+)", encoder[1], re.ASCII)
    if layer is None:
        return None
    rest = re.sub(r"^attention\.", "self_attention.", layer[2])
    for theirs, ours in LEGACY_READ.items():
        if rest.startswith(theirs):
            return f"{stack}layers.{layer[1]}.{ours}{rest.removeprefix(theirs)}"
    return None


def with_layer_offset(name: str, offset: int) -> str:
    """The name in the whole model of a parameter whose stage begins at layer `offset`."""
    match = OURS_LAYER.fullmatch(name)
    return f"{stack_of(name)}{int(match[1]) + offset}.{match[2]}" if match else name


def layer_of(name: str) -> int | None:
    """The layer in a name of ours; None for a parameter outside the layers."""
    match = OURS_LAYER.fullmatch(name)
    return int(match[1]) if match else None


# --- ours to theirs ---------------------------------------------------------------------------


def registration_order(names: list[str], style: str) -> list[str]:
    """Names of ours in the order of Megatron's modules. style: a key of REGISTRATION_ORDER."""
    prefixes = REGISTRATION_ORDER[style]

    def place(name: str) -> tuple[int, int, int, int]:
        is_bias = int(name.endswith(".bias"))
        match = OURS_LAYER.fullmatch(name)
        if match:
            at = next(i for i, prefix in enumerate(prefixes) if match[2].startswith(prefix))
            return 1, int(match[1]), at, is_bias
        if name.startswith("embedding."):
            return 0, 0, next(i for i, table in enumerate(TABLES) if table in name), 0
        if FINAL_NORM.partition(".")[2] in name:
            return 2, 0, 0, is_bias
        heads = (i for i, head in enumerate(HEADS_IN_ORDER) if name.startswith(head))
        return 3, next(heads), int("norm" in name), is_bias

    return sorted(names, key=place)


def their_name(name: str, style: str) -> str:
    """The dotted path of a parameter of ours; layers in both are numbered on their stage."""
    match = OURS_LAYER.fullmatch(name)
    if style == "legacy":
        return _to_legacy(name, match)
    if style == "transformer_engine" and match:
        for theirs, ours in ENGINE.items():
            if match[2].startswith(ours):
                return f"{stack_of(name)}{match[1]}.{theirs}{match[2].removeprefix(ours)}"
    return name


def _to_legacy(name: str, match: re.Match[str] | None) -> str:
    if match:
        for theirs, ours in LEGACY.items():
            if match[2].startswith(ours):
                rest = match[2].removeprefix(ours)
                return f"{LEGACY_ROOT}encoder.layers.{match[1]}.{theirs}{rest}"
    if ".final_layernorm." in name:
        return f"{LEGACY_ROOT}encoder.final_norm.{name.rpartition('.')[2]}"
    for theirs, ours in LEGACY_HEADS.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return f"{LEGACY_ROOT}{name}"


def nested(flat: Mapping[str, Any], style: str) -> dict[str, Any]:
    """The model dict of a file: flat for core; for legacy nested down to modules."""
    if style != "legacy":
        return dict(flat)
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        parts = path.split(".")
        if parts[:2] in (["language_model", "encoder"], ["language_model", "pooler"]):
            parts = [*parts[:2], ".".join(parts[2:])]
        elif parts[0] in ("lm_head", "binary_head"):
            parts = [parts[0], ".".join(parts[1:])]
        node = tree
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = value
    return tree


def style_of(model_class: ModelClass, transformer_impl: TransformerImpl | None) -> str:
    """The key of REGISTRATION_ORDER. transformer_impl: None means Transformer Engine's layer,
    Megatron-LM's default."""
    if model_class == "legacy":
        return "legacy"
    return transformer_impl or "transformer_engine"


def has_tied_copy(config: TransformerConfig, pp: int) -> bool:
    """Whether the last stage repeats the embedding."""
    return pp > 1 and not config.untie_embeddings_and_output_weights
