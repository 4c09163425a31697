"""Translates names of parameters between Megatron-LM's checkpoints and ours, both ways.

The tables are in `checkpoint_names.py` of the families in `models/`. Our names are those of a core
GPTModel, BertModel, RetroModel or T5Model with the local layer, but for T5's output layer; of a
hybrid they are MambaModel's, but for its norms. A `core` checkpoint
may also have the names of Transformer Engine's layer, which keeps a norm inside the matrix that
follows it. `legacy` is the older model class, whose names differ, some in several spellings. Layers
are numbered from 0 on every pipeline stage. Names are dotted paths, the keys of nested dicts
joined."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from trainyard.conversion.megatron.experts import expert_of, single_name
from trainyard.models.bert.checkpoint_names import (
    HEADS,
    HEADS_IN_ORDER,
    LEGACY_HEADS,
    LEGACY_HEADS_READ,
)
from trainyard.models.config import ModelType, TransformerConfig
from trainyard.models.gpt.checkpoint_names import (
    ENGINE,
    ENGINE_LATENTS,
    FINAL_NORM,
    LEGACY,
    LEGACY_READ,
    OUTPUT,
    PREDICTION,
    REGISTRATION_ORDER,
)
from trainyard.models.mamba import checkpoint_names as mamba_names
from trainyard.models.retro import checkpoint_names as retro_names
from trainyard.models.t5 import checkpoint_names as t5_names

ModelClass = Literal["core", "legacy"]
TransformerImpl = Literal["transformer_engine", "local"]

PRE_MLP_NORM = "pre_mlp_layernorm."

TIED_COPY = "tied copy"
"""Stands for a name of ours: the output layer of a last stage that repeats the tied embedding."""

REPEATED = "repeated"
"""Stands for a name of ours: a tensor that the file has under another name as well."""

OURS_LAYER = re.compile(r"(?:de|en)coder\.layers\.(\d{1,9})\.(.+)", re.ASCII)
"""Of every family. The part before the number is `stack_of(name)`."""

PREDICTION_LAYER = re.compile(
    r"(mtp\.layers\.\d{1,9}\.)(?:transformer_layer|mtp_model_layer)\.(.+)", re.ASCII
)
"""The transformer layer of a depth of multi-token prediction; the second is the name of
Megatron-LM's main branch."""

OF_ENCODER = re.compile(rf"({re.escape(retro_names.ENCODER)}\d{{1,9}}\.)(.+)", re.ASCII)
"""In a layer of a Retro's decoder: a layer of the encoder."""

STACKS: dict[ModelType, tuple[str, ...]] = {
    "gpt": ("decoder.",),
    "bert": ("encoder.",),
    "t5": ("encoder.", "decoder."),
    "mamba": ("decoder.",),
    "retro": ("decoder.",),
}
"""Modules with layers."""
OUTSIDE: dict[ModelType, tuple[str, ...]] = {
    "gpt": (FINAL_NORM,),
    "bert": HEADS,
    "t5": t5_names.OUTSIDE,
    "mamba": (FINAL_NORM,),
    "retro": (FINAL_NORM,),
}
"""Prefixes of names of core outside the layers that are ours as well, beside the embedding."""

IN_MATRICES = ENGINE | mamba_names.ENGINE
"""Norms inside of the matrices that follow them: prefixes of names, and ours."""

TABLES = ("word", "position", "tokentype")
"""Of the embedding, in the order of the files."""

LEGACY_ROOT = "language_model."
LEGACY_STACK = re.compile(r"language_model\.(encoder|decoder|transformer)\.(?:transformer\.)?(.+)")
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
    """`decoder.layers.` or `encoder.layers.`."""
    return f"{name.partition('.')[0]}.layers."


# --- theirs to ours ---------------------------------------------------------------------------


def family_in(paths: Iterable[str]) -> ModelType:
    """The family whose names these are, of either class; that of a BERT shows on its last stage."""
    for path in paths:
        if path.startswith("lm_head.dense."):
            return "bert"
        if retro_names.SIGN in path:
            return "retro"
        if any(name in path for name in t5_names.SIGNS):
            return "t5"
        if mamba_names.SIGN in path or path.startswith(mamba_names.THEIR_FINAL_NORM):
            return "mamba"
    return "gpt"


def is_legacy(paths: Iterator[str] | list[str]) -> bool:
    """Whether these are names of the legacy class."""
    return any(path.startswith(LEGACY_ROOT) for path in paths)


def is_state_of_engine(path: str) -> bool:
    """Whether it is Transformer Engine's extra state, such as FP8 scales, and no weight."""
    return path.endswith("._extra_state") or "._extra_state." in path


def our_name(path: str, *, tied: bool, family: ModelType = "gpt") -> str | None:
    """Our name, with the layer's number on its stage; TIED_COPY or REPEATED; None for an unknown
    path."""
    if family == "bert":
        for theirs, ours in LEGACY_HEADS_READ.items():
            if path.startswith(theirs):
                return ours + path.removeprefix(theirs)
    if family == "t5" and (path in t5_names.HEADS or path in t5_names.REPEATED):
        return t5_names.HEADS.get(path, REPEATED)
    if path.startswith(LEGACY_ROOT) or path == LEGACY_COPY:
        return _of_legacy(path, family)
    path = single_name(path)
    if family == "mamba" and path.startswith(mamba_names.THEIR_FINAL_NORM):
        return FINAL_NORM + path.removeprefix(mamba_names.THEIR_FINAL_NORM)
    if path == OUTPUT:
        return TIED_COPY if tied else OUTPUT
    if path.startswith(PREDICTION) and family == "gpt":
        return _of_prediction(path)
    match = OURS_LAYER.fullmatch(path)
    if match is None:
        return path if path.startswith(("embedding.", *OUTSIDE[family])) else None
    if not path.startswith(STACKS[family]):
        return None
    number, rest = match.groups()
    return f"{stack_of(path)}{number}.{_without_engine(rest)}"


def _without_engine(rest: str) -> str:
    """Our name within a layer of core."""
    if match := OF_ENCODER.fullmatch(rest):
        return f"{match[1]}{_without_engine(match[2])}"
    for theirs, ours in (IN_MATRICES | ENGINE_LATENTS).items():
        if rest.startswith(theirs):
            return ours + rest.removeprefix(theirs)
    return rest


def _of_prediction(path: str) -> str:
    match = PREDICTION_LAYER.fullmatch(path)
    if match is None:
        return path
    return f"{match[1]}transformer_layer.{_without_engine(match[2])}"


def _of_legacy(path: str, family: ModelType) -> str | None:
    if path == LEGACY_COPY:
        return TIED_COPY
    if path == f"{LEGACY_ROOT}{OUTPUT}":
        return OUTPUT
    if match := LEGACY_EMBEDDING.fullmatch(path):
        return f"embedding.{match[1]}_embeddings.weight"
    found = LEGACY_STACK.fullmatch(path)
    if found is None or (found[1] == "decoder" and family != "t5"):
        return None
    stack = "decoder." if found[1] == "decoder" else STACKS[family][0]
    if match := LEGACY_FINAL.fullmatch(found[2]):
        return f"{stack}final_layernorm.{match[1]}"
    layer = re.fullmatch(r"layers\.(\d{1,9})\.(.+)", found[2], re.ASCII)
    if layer is None:
        return None
    rest = re.sub(r"^attention\.", "self_attention.", layer[2])
    across = t5_names.LEGACY_ACROSS_READ if found[1] == "decoder" else {}
    for theirs, ours in (
        across | {k: v for k, v in LEGACY_READ.items() if k not in across}
    ).items():
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


def registration_order(names: list[str], style: str, *, grouped: bool = False) -> list[str]:
    """Names of ours in the order of Megatron's modules. style: a key of REGISTRATION_ORDER.
    grouped: experts are in a grouped product, where the first matrices of all come before the
    second ones; otherwise one MLP after the other."""
    prefixes = REGISTRATION_ORDER[style]

    def place(name: str) -> tuple[int, ...]:
        if name.startswith(PREDICTION):  # whose states of the optimizer are left out
            return (2,)
        is_bias, is_decoder = int(name.endswith(".bias")), int(name.startswith("decoder"))
        match = OURS_LAYER.fullmatch(name)
        if match:
            at = next(i for i, prefix in enumerate(prefixes) if match[2].startswith(prefix))
            layer = (1, is_decoder, 0, int(match[1]), at)
            expert, second = expert_of(match[2]) or 0, int(".linear_fc2." in match[2])
            return *layer, *((second, expert) if grouped else (expert, second)), is_bias
        if name.startswith("embedding."):
            return 0, next(i for i, table in enumerate(TABLES) if table in name)
        if "relative_pos_emb." in name:
            return 0, len(TABLES) + is_decoder
        if FINAL_NORM.partition(".")[2] in name:
            return 1, is_decoder, 1, is_bias
        heads = (i for i, head in enumerate(HEADS_IN_ORDER) if name.startswith(head))
        return 3, next(heads), int("norm" in name), is_bias

    return sorted(names, key=place)


def their_name(
    name: str,
    style: str,
    family: ModelType = "gpt",
    *,
    in_mixture: bool = False,
    latents: bool = False,
) -> str:
    """The dotted path of a parameter of ours; layers in both are numbered on their stage.
    in_mixture: of a layer with experts, whose norm Transformer Engine keeps apart. latents: of a
    model with multi-latent attention."""
    match = OURS_LAYER.fullmatch(name)
    stack = "" if match is None else f"{stack_of(name)}{match[1]}."
    if match is None and (match := PREDICTION_LAYER.fullmatch(name)):
        stack = f"{match[1]}transformer_layer."
    if style == "legacy":
        return _to_legacy(name, match, family)
    if family == "t5" and name in t5_names.CORE_HEADS:
        return t5_names.CORE_HEADS[name]
    if family == "mamba" and name.startswith(FINAL_NORM):
        return mamba_names.THEIR_FINAL_NORM + name.removeprefix(FINAL_NORM)
    if style == "transformer_engine" and match:
        rest = match[2]
        if inner := OF_ENCODER.fullmatch(rest):
            stack, rest = f"{stack}{inner[1]}", inner[2]
        for theirs, ours in (ENGINE_LATENTS if latents else IN_MATRICES).items():
            if ours == PRE_MLP_NORM and (in_mixture or rest.startswith(retro_names.NEIGHBOR_NORM)):
                continue
            if rest.startswith(ours):
                return f"{stack}{theirs}{rest.removeprefix(ours)}"
    return name


def is_in_mixture(name: str, config: TransformerConfig) -> bool:
    """Whether a parameter, by its name in the whole model, is of a layer with experts."""
    layer = config.num_layers if name.startswith(PREDICTION) else layer_of(name)
    return layer is not None and config.has_experts(layer)


def repeated_names(name: str, style: str, family: ModelType) -> tuple[str, ...]:
    """Further paths under which a file has a parameter of ours."""
    return t5_names.CORE_COPIES.get(name, ()) if family == "t5" and style != "legacy" else ()


def _to_legacy(name: str, match: re.Match[str] | None, family: ModelType) -> str:
    is_across = family == "t5" and name.startswith("decoder.")
    stack = f"{LEGACY_ROOT}{'decoder' if is_across else 'encoder'}."
    if match:
        for theirs, ours in (LEGACY | (t5_names.LEGACY_ACROSS if is_across else {})).items():
            if match[2].startswith(ours):
                return f"{stack}layers.{match[1]}.{theirs}{match[2].removeprefix(ours)}"
    if ".final_layernorm." in name:
        return f"{stack}final_norm.{name.rpartition('.')[2]}"
    if family == "t5" and name == t5_names.BIAS:
        return t5_names.LEGACY_BIAS
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
        if parts[0] == "language_model" and parts[1] in ("encoder", "decoder", "pooler"):
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
