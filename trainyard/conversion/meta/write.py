"""Writing a model as Meta publishes Llama, and Mistral its first ones: the way back of `meta`.

    consolidated.00.pth ... consolidated.NN.pth   one for each tensor-parallel rank
    tokenizer.model, or the other files of the tokenizer that is carried
    params.json, last

Weights are cut and turned, never computed with. Embeddings that are tied lie once in a file, under
both of their names, as Meta's program wants both. One tensor of one rank is in memory at a time.

n query heads, g key and value heads, d head channels, h hidden."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainyard.checkpoint.reshard import OpenFile
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.huggingface.to_hf import part_of
from trainyard.conversion.megatron.layout import Boxes, Cut, boxes_of_rank, cut_of
from trainyard.conversion.megatron.model import WholeModel, whole_model
from trainyard.conversion.meta.params import (
    EMBEDDING,
    OUTPUT,
    is_llama3,
    params_document,
    read_params,
    refuse_for_meta,
)
from trainyard.conversion.meta.read import PARAMS, slice_name
from trainyard.conversion.source import Source
from trainyard.conversion.torch_save.write import LazyTensor, write_torch_file
from trainyard.errors import ConfigError
from trainyard.models.gpt.checkpoint_names import EMBEDDING as OUR_EMBEDDING
from trainyard.models.gpt.checkpoint_names import META_LAYER, Part
from trainyard.models.gpt.config import GPTConfig
from trainyard.parallel.pipeline.partition import nearest
from trainyard.tokenizers.base import DESCRIPTION

log = logging.getLogger(__name__)

TP = "--target-tensor-parallel-size"


PIECES = "tokenizer.model"
"""The one file of a tokenizer that Meta's program looks for."""


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of Meta's and how a rank's part of it follows from the same part of one of ours."""

    name: str
    source: str
    """Name of our parameter."""
    convert: Callable[[Tensor], Tensor]


def write_meta_folder(
    source: Source,
    open_file: OpenFile,
    *,
    num_files: int = 1,
    expect: Callable[[int], object] = lambda size_bytes: None,
    advance: Callable[[int], object] = lambda size_bytes: None,
) -> None:
    """Write the weights of a Llama or Mistral.

    num_files: tensor-parallel ranks of Meta's program, each of which loads one.
    expect: called before the first file with the total bytes that `advance` will report.
    Raises ConfigError, before anything is written, for a model that these files do not hold."""
    refuse_for_meta(source.config, num_files)
    _refuse_cuts(source.config, source.padded_vocab_size, num_files)
    document = params_document(source.config, source.padded_vocab_size)
    model = whole_model(source, num_files)
    _warn(source, document)
    writers = [_RankWriter(model, rank, num_files, advance) for rank in range(num_files)]
    expect(sum(writer.size_bytes() for writer in writers))
    for rank, writer in enumerate(writers):
        name = slice_name(rank)
        with open_file(name) as out:
            write_torch_file(out, writer.tree(), name.removesuffix(".pth"))
    files = source.tokenizer_files()
    documents = {name: data for name, data in files.items() if name != DESCRIPTION}
    documents[PARAMS] = (json.dumps(document, indent=2) + "\n").encode()
    for name, data in documents.items():
        with open_file(name) as out:
            out.write(data)


def _refuse_cuts(config: GPTConfig, rows: int, tp: int) -> None:
    """What ranks share out must have as many parts."""
    counts = {
        "key and value heads": config.query_groups,
        "channels of the embedding": config.hidden_size,
        "channels of the MLP": config.ffn_size,
    }
    for what, count in counts.items():
        if count % tp:
            raise ConfigError(
                f"{count} {what} cannot be cut over {TP} {tp}; {nearest(TP, count, tp)}"
            )
    if rows % tp:
        raise ConfigError(
            f"a vocabulary of {rows} rows cannot be cut over {TP} {tp}; "
            "--make-vocab-size-divisible-by 1 pads it to the next multiple of that"
        )
    if tp > 1 and _is_tied(config) and not is_llama3(config):
        raise ConfigError(
            f"{TP} {tp}: embedding and output layer of this model are one tensor, and ranks of "
            "Llama 1 and 2 share out columns of the one and rows of the other; leave the option "
            "out, or take --saver hf"
        )


def _warn(source: Source, document: dict[str, object]) -> None:
    """Of what these files do not say, or Meta's program does not take."""
    config, rows = source.config, source.padded_vocab_size
    specs = {EMBEDDING: TensorSpec("F32", (rows, config.hidden_size))}
    understood, _ = read_params(document, PARAMS, specs)
    if understood.positions != config.positions:
        log.warning(
            "%s does not tell the longest sequence, which is %d here: programs want it from their "
            "caller, and --loader llama_mistral takes %d, as of the model that it looks like",
            *(PARAMS, config.positions, understood.positions),
        )
    if source.vocab_size < rows:
        log.warning(
            "the embedding has %d rows for %d tokens, and Meta's program wants as many as its "
            "tokenizer has; --make-vocab-size-divisible-by 1 cuts them",
            *(rows, source.vocab_size),
        )
    if PIECES not in source.tokenizer_files():
        log.warning(
            "%s carries no %s, the tokenizer that Meta's program looks for; --tokenizer-type "
            "Llama2Tokenizer --tokenizer-model FILE gives it one",
            *(source.url, PIECES),
        )


def _is_tied(config: GPTConfig) -> bool:
    return not config.untie_embeddings_and_output_weights


# --- the tensors of a file ----------------------------------------------------------------------


class _RankWriter:
    """One file: what a rank holds."""

    def __init__(
        self, model: WholeModel, rank: int, tp: int, advance: Callable[[int], object]
    ) -> None:
        self._model, self._rank, self._tp, self._advance = model, rank, tp, advance
        self._name: str | None = None
        self._part: Tensor | None = None

    def tree(self) -> dict[str, LazyTensor]:
        """What `torch.load` gives back, tensors still to be made."""
        found = {item.name: self._lazy(item) for item in targets(self._model.config, self._tp)}
        if _is_tied(self._model.config):
            found[OUTPUT] = found[EMBEDDING]
        return found

    def size_bytes(self) -> int:
        """Of the tensors, each once."""
        return sum(lazy.spec.size_bytes for lazy in set(self.tree().values()))

    def _lazy(self, target: Target) -> LazyTensor:
        model, full = self._model, f"model.{target.source}"
        cut = _cut_of(target.source, model.config)
        boxes = boxes_of_rank(model.specs[full].shape, cut, self._rank, self._tp)
        shape = target.convert(torch.empty(boxes.shape, device="meta")).shape
        spec = TensorSpec(model.specs[full].dtype, tuple(shape))

        def make() -> Tensor:
            self._advance(spec.size_bytes)
            return target.convert(self._read(full, boxes)).contiguous()

        return LazyTensor(spec, make)

    def _read(self, name: str, boxes: Boxes) -> Tensor:
        """The part of the rank; kept, as the next tensors are of it as well."""
        if name != self._name or self._part is None:
            self._part = None  # before the next one is read
            read = self._model.read_slice
            found = [read(name, offset, boxes.extent) for offset in boxes.offsets]
            self._part = found[0] if len(found) == 1 else torch.cat(found)
            self._name = name
        return self._part


def _cut_of(name: str, config: GPTConfig) -> Cut:
    """How ranks share out a parameter, by our name: as Megatron-LM's, but for the embedding of
    Llama 1 and 2."""
    if name == OUR_EMBEDDING and not is_llama3(config):
        return "columns"
    return cut_of(name, config)


def targets(config: GPTConfig, tp: int) -> list[Target]:
    """Every tensor of a rank's file; of one tensor of ours, its parts one after the other."""
    found = [Target(EMBEDDING, OUR_EMBEDDING, _as_is)]
    for layer in range(config.num_layers):
        found += _of_layer(config, tp, f"layers.{layer}.", f"decoder.layers.{layer}.")
    found.append(Target("norm.weight", "decoder.final_layernorm.weight", _as_is))
    if not _is_tied(config):
        found.append(Target(OUTPUT, "output_layer.weight", _as_is))
    return found


def _of_layer(config: GPTConfig, tp: int, theirs: str, ours: str) -> list[Target]:
    local = _of_rank(config, tp)

    def convert(part: Part) -> Callable[[Tensor], Tensor]:
        return lambda tensor: _part_of(tensor, part, local)

    return [
        Target(f"{theirs}{name}", f"{ours}{source}", convert(part))
        for name, source, part in META_LAYER
    ]


def _of_rank(config: GPTConfig, tp: int) -> GPTConfig:
    """The heads that a rank has."""
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // tp,
        kv_channels=config.head_dim,
        group_query_attention=True,
        num_query_groups=config.query_groups // tp,
    )


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def _part_of(tensor: Tensor, part: Part, local: GPTConfig) -> Tensor:
    """The part of one of our tensors, rows of queries and keys as they are rotated there."""
    found = part_of(tensor, part, local)
    return pairs_of_halves(found, local.head_dim) if part in ("q", "k") else found


def pairs_of_halves(tensor: Tensor, d: int) -> Tensor:
    """Rows of each head, (n d, h): from first and second halves to channel pairs side by side;
    undone by `meta.halves_of_pairs`."""
    return tensor.view(-1, 2, d // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
