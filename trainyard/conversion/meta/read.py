"""Opens Llama as Meta published it, as a source.

    params.json   dim n_layers n_heads n_kv_heads norm_eps multiple_of ffn_dim_multiplier rope_theta
    consolidated.00.pth ... consolidated.NN.pth   one for each tensor-parallel rank
    tokenizer.model: SentencePiece, or the ranks of tiktoken (Llama 3)

    tok_embeddings.weight (columns; since Llama 3, rows)   output.weight (rows)   norm.weight
    layers.L.attention.{wq,wk,wv} (rows), .wo (columns)
    layers.L.feed_forward.{w1,w3} (rows), .w2 (columns)
    layers.L.{attention_norm,ffn_norm}.weight

Each rank's file has a slice of the rows or columns, as the brackets say; all files have the same
norms. If the output layer is the embedding (Llama 3.2), output.weight is missing or shares its
memory.

Rotary channels of queries and keys are adjacent pairs there; here each head has first all first,
then all second channels of the pairs.

n query heads, g key and value heads, d head channels, h hidden, f width of the MLP."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.bounds import check_model
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.documents import read_document
from trainyard.conversion.fields import Fields
from trainyard.conversion.huggingface.from_hf import join_qkv
from trainyard.conversion.lazy_tensors import (
    About,
    AssembledSource,
    Make,
    TensorRecipe,
    as_is,
)
from trainyard.conversion.meta.params import EMBEDDING, OUTPUT, read_params
from trainyard.conversion.source import refuse_differences
from trainyard.conversion.tokenizer_files import find_tokenizer
from trainyard.conversion.torch_save.file import TorchWeights
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.checkpoint_names import META_LAYER
from trainyard.models.gpt.config import GPTConfig

PARAMS = "params.json"
SLICE = re.compile(r"consolidated\.(\d+)\.pth")
FIRST = "consolidated.00.pth"

CUT_ALONG: dict[str, int | None] = {
    **dict.fromkeys(("tok_embeddings", "wo", "w2"), 1),
    **dict.fromkeys(("output", "wq", "wk", "wv", "w1", "w3"), 0),
    **dict.fromkeys(("norm", "attention_norm", "ffn_norm"), None),
}
"""The dim that ranks shard, by the last part of a name before `.weight`; None: not sharded."""

BUFFER = "rope.freqs"
"""Ending of names of tensors that follow from params.json."""


def open_meta(url: str) -> AssembledSource:
    """The model in a folder of Meta's layout."""
    where = join(url, PARAMS)
    document = read_document(where)
    weights = SlicedWeights(url, Fields(document, where).need("dim", int))
    try:
        config, rows = read_params(document, where, weights.specs)
        check_model(config, rows, len(weights.specs), where)
        found = {name: spec.shape for name, spec in weights.specs.items()}
        refuse_differences(found, wanted_shapes(config, rows), url, PARAMS)
        about = About(url, config, rows, find_tokenizer(url))
        return AssembledSource(about, recipes(config), weights)
    except BaseException:
        weights.close()
        raise


# --- the files ----------------------------------------------------------------------------------


def wanted_shapes(config: GPTConfig, rows: int) -> dict[str, tuple[int, ...]]:
    """Every tensor that Meta's files must hold, merged."""
    h, f = config.hidden_size, config.ffn_size
    q, kv = config.query_size, config.kv_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (rows, h), "norm.weight": (h,)}
    if config.untie_embeddings_and_output_weights:
        shapes[OUTPUT] = (rows, h)
    for layer in range(config.num_layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "attention_norm": (h,),
            "attention.wq": (q, h),
            "attention.wk": (kv, h),
            "attention.wv": (kv, h),
            "attention.wo": (h, q),
            "ffn_norm": (h,),
            "feed_forward.w1": (f, h),
            "feed_forward.w2": (h, f),
            "feed_forward.w3": (f, h),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


class SlicedWeights:
    """The tensors of all ranks' files, merged.

    hidden: h, from which the sharding of the embedding is derived."""

    def __init__(self, url: str, hidden: int) -> None:
        self._files: list[TorchWeights] = []
        self._dims: dict[str, int | None] = {}
        names = _slices(url)
        try:
            self._files += (TorchWeights(join(url, name)) for name in names)
            _refuse_unlike([file.specs for file in self._files], names, url)
            self.specs: Mapping[str, TensorSpec] = {
                name: self._merged(name, spec, hidden, url)
                for name, spec in self._files[0].specs.items()
                if not name.endswith(BUFFER) and not (name == OUTPUT and self._is_tied())
            }
        except BaseException:
            self.close()
            raise

    def _is_tied(self) -> bool:
        """Whether the output layer shares the embedding's memory in every file."""
        return all(file.are_one(OUTPUT, EMBEDDING) for file in self._files)

    def _merged(self, name: str, spec: TensorSpec, hidden: int, url: str) -> TensorSpec:
        dim = _dim_of(name, url)
        if name == EMBEDDING and spec.shape[-1:] == (hidden,):
            dim = 0  # since Llama 3, ranks shard it by rows
        self._dims[name] = dim if len(self._files) > 1 else None
        if self._dims[name] is None:
            return spec
        assert dim is not None
        shape = list(spec.shape)
        if dim >= len(shape):
            raise ArtifactError(f"{url}: {name} is {shape} in {FIRST}")
        shape[dim] = sum(file.specs[name].shape[dim] for file in self._files)
        return TensorSpec(spec.dtype, tuple(shape))

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        dim = self._dims[name]
        if dim is None:
            return self._files[0].read(name)
        return torch.cat([file.read(name) for file in self._files], dim=dim)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _slices(url: str) -> list[str]:
    """The files of the ranks, in order of rank; ConfigError if one is missing."""
    names = sorted(name for name in store.list_folder(url) if SLICE.fullmatch(name))
    if not names:
        raise ConfigError(f"{url}: has no {FIRST}; give the folder that has it")
    wanted = [slice_name(rank) for rank in range(len(names))]
    if names != wanted:
        missing = sorted(set(wanted) - set(names))
        raise ConfigError(f"{url}: has {', '.join(names[:8])}, but {missing[0]} is missing")
    return names


def slice_name(rank: int) -> str:
    """The file of a rank."""
    return f"consolidated.{rank:02d}.pth"


def _refuse_unlike(files: Sequence[Mapping[str, TensorSpec]], names: list[str], url: str) -> None:
    """Refuse files that differ in the names, types or shapes of tensors."""
    for name, specs in zip(names, files, strict=True):
        odd = sorted(key for key in {*specs, *files[0]} if specs.get(key) != files[0].get(key))
        if odd:
            raise ArtifactError(
                f"{url}: {odd[0]} differs in type or shape between {names[0]} and {name}"
            )


def _dim_of(name: str, url: str) -> int | None:
    part = _last_part(name)
    if part not in CUT_ALONG:
        raise ArtifactError(f"{url}: tensor {name!r} is not one of Llama's")
    return CUT_ALONG[part]


def _last_part(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


# --- their tensors as ours ----------------------------------------------------------------------


def recipes(config: GPTConfig) -> dict[str, TensorRecipe]:
    """Every tensor of our model, by its name, from Meta's."""
    found = {
        "embedding.word_embeddings.weight": TensorRecipe((EMBEDDING,), as_is),
        "decoder.final_layernorm.weight": TensorRecipe(("norm.weight",), as_is),
    }
    if config.untie_embeddings_and_output_weights:
        found["output_layer.weight"] = TensorRecipe((OUTPUT,), as_is)
    sources: dict[str, list[str]] = {}
    for theirs, ours, _ in META_LAYER:
        sources.setdefault(ours, []).append(theirs)
    makes: dict[int, Make] = {1: as_is, 2: _one_below_the_other, 3: _qkv_of(config)}
    for layer in range(config.num_layers):
        for ours, names in sources.items():
            parts = tuple(f"layers.{layer}.{name}" for name in names)
            found[f"decoder.layers.{layer}.{ours}"] = TensorRecipe(parts, makes[len(parts)])
    return found


def _one_below_the_other(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


def _qkv_of(config: GPTConfig) -> Make:
    def make(parts: Sequence[Tensor]) -> Tensor:
        q, k, v = parts
        d = config.head_dim
        return join_qkv([halves_of_pairs(q, d), halves_of_pairs(k, d), v], config)

    return make


def halves_of_pairs(tensor: Tensor, d: int) -> Tensor:
    """Rows (n d, h): in each head, from adjacent channel pairs to first halves, second halves."""
    return tensor.view(-1, d // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
