"""Writes a model as Meta publishes Llama, or as Mistral published its first models.

    consolidated.00.pth ... consolidated.NN.pth   one for each tensor-parallel rank
    tokenizer.model, or the other files of the tokenizer that is carried
    params.json, last

Weights are sliced and reordered, never computed with. A tied embedding is stored once, under both
names, since Meta's program needs both. One tensor of one rank is in memory at a time.

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
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.checkpoint_names import EMBEDDING as OUR_EMBEDDING
from trainyard.models.gpt.checkpoint_names import META_LAYER, Part
from trainyard.parallel.pipeline.partition import nearest
from trainyard.tokenizers.carried import DESCRIPTION

log = logging.getLogger(__name__)

TP = "--target-tensor-parallel-size"


PIECES = "tokenizer.model"
"""The one file of a tokenizer that Meta's program looks for."""


@dataclass(frozen=True, slots=True)
class MetaTensor:
    """A tensor of Meta's. A rank's slice of it follows from the same slice of one of ours."""

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

    num_files: one for each tensor-parallel rank of Meta's program.
    expect: called before the first file with the total bytes that `advance` will report.
    Raises ConfigError, before anything is written, for a model that these files cannot hold."""
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


def _refuse_cuts(config: TransformerConfig, rows: int, tp: int) -> None:
    """Refuse sizes that `tp` ranks cannot share evenly."""
    counts = {
        "key and value heads": config.query_groups,
        "channels of the embedding": config.hidden_size,
        "channels of the MLP": config.ffn_size,
    }
    for what, count in counts.items():
        if count % tp:
            raise ConfigError(
                f"{count} {what} must be divisible by {TP} {tp}; {nearest(TP, count, tp)}"
            )
    if rows % tp:
        raise ConfigError(
            f"a vocabulary of {rows} rows must be divisible by {TP} {tp}; "
            "--make-vocab-size-divisible-by 1 pads it to the next multiple"
        )
    if tp > 1 and _is_tied(config) and not is_llama3(config):
        raise ConfigError(
            f"{TP} {tp}: this model's embedding is its output layer, but ranks of Llama 1 and 2 "
            "shard the embedding by columns and the output layer by rows; leave the option out, "
            "or use --saver hf"
        )


def _warn(source: Source, document: dict[str, object]) -> None:
    """Warn about what these files cannot store or Meta's program does not accept."""
    config, rows = source.config, source.padded_vocab_size
    specs = {EMBEDDING: TensorSpec("F32", (rows, config.hidden_size))}
    understood, _ = read_params(document, PARAMS, specs)
    if understood.positions != config.positions:
        log.warning(
            "%s does not store the longest sequence, which is %d: pass it to the program that "
            "loads the files; --loader llama_mistral will assume %d",
            *(PARAMS, config.positions, understood.positions),
        )
    if source.vocab_size < rows:
        log.warning(
            "the embedding has %d rows for %d tokens, but Meta's program needs one row per token; "
            "--make-vocab-size-divisible-by 1 removes the padding",
            *(rows, source.vocab_size),
        )
    if PIECES not in source.tokenizer_files():
        log.warning(
            "%s carries no %s, the tokenizer that Meta's program loads; to add one, give "
            "--tokenizer-type Llama2Tokenizer --tokenizer-model FILE",
            *(source.url, PIECES),
        )


def _is_tied(config: TransformerConfig) -> bool:
    return not config.untie_embeddings_and_output_weights


# --- the tensors of a file ----------------------------------------------------------------------


class _RankWriter:
    """Makes the file of one rank."""

    def __init__(
        self, model: WholeModel, rank: int, tp: int, advance: Callable[[int], object]
    ) -> None:
        self._model, self._rank, self._tp, self._advance = model, rank, tp, advance
        self._name: str | None = None
        self._part: Tensor | None = None

    def tree(self) -> dict[str, LazyTensor]:
        """What `torch.load` will return, with tensors that are made when they are written."""
        found = {item.name: self._lazy(item) for item in targets(self._model.config, self._tp)}
        if _is_tied(self._model.config):
            found[OUTPUT] = found[EMBEDDING]
        return found

    def size_bytes(self) -> int:
        """Total of the tensors, each counted once."""
        return sum(lazy.spec.size_bytes for lazy in set(self.tree().values()))

    def _lazy(self, target: MetaTensor) -> LazyTensor:
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
        """The rank's slice of our tensor; kept, since the next targets may need it too."""
        if name != self._name or self._part is None:
            self._part = None  # before the next one is read
            read = self._model.read_slice
            pairs = zip(boxes.offsets, boxes.extents, strict=True)
            found = [read(name, offset, extent) for offset, extent in pairs]
            self._part = found[0] if len(found) == 1 else torch.cat(found)
            self._name = name
        return self._part


def _cut_of(name: str, config: TransformerConfig) -> Cut:
    """How ranks shard a parameter, by our name: as in Megatron-LM, except for the embedding of
    Llama 1 and 2."""
    if name == OUR_EMBEDDING and not is_llama3(config):
        return "columns"
    return cut_of(name, config)


def targets(config: TransformerConfig, tp: int) -> list[MetaTensor]:
    """Every tensor of a rank's file; the parts of one of our tensors follow each other."""
    found = [MetaTensor(EMBEDDING, OUR_EMBEDDING, _as_is)]
    for layer in range(config.num_layers):
        found += _of_layer(config, tp, f"layers.{layer}.", f"decoder.layers.{layer}.")
    found.append(MetaTensor("norm.weight", "decoder.final_layernorm.weight", _as_is))
    if not _is_tied(config):
        found.append(MetaTensor(OUTPUT, "output_layer.weight", _as_is))
    return found


def _of_layer(config: TransformerConfig, tp: int, theirs: str, ours: str) -> list[MetaTensor]:
    local = _of_rank(config, tp)

    def convert(part: Part) -> Callable[[Tensor], Tensor]:
        return lambda tensor: _part_of(tensor, part, local)

    return [
        MetaTensor(f"{theirs}{name}", f"{ours}{source}", convert(part))
        for name, source, part in META_LAYER
    ]


def _of_rank(config: TransformerConfig, tp: int) -> TransformerConfig:
    """The configuration with only the heads that a rank has."""
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // tp,
        kv_channels=config.head_dim,
        group_query_attention=True,
        num_query_groups=config.query_groups // tp,
    )


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def _part_of(tensor: Tensor, part: Part, local: TransformerConfig) -> Tensor:
    """A part of one of our tensors, rows of queries and keys in the order of Meta's rotation."""
    found = part_of(tensor, part, local)
    return pairs_of_halves(found, local.head_dim) if part in ("q", "k") else found


def pairs_of_halves(tensor: Tensor, d: int) -> Tensor:
    """Rows (n d, h): in each head, from first halves, second halves to adjacent channel pairs; the
    inverse of `read.halves_of_pairs`."""
    return tensor.view(-1, 2, d // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
