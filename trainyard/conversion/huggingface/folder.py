"""Writes a Hugging Face folder: sharded safetensors with their index, configs, tokenizer.

    model-0000k-of-0000N.safetensors, model.safetensors.index.json   (one shard: model.safetensors)
    config.json  generation_config.json  tokenizer.json  tokenizer_config.json  ...

Two tensors of ours are in memory at a time. `to_hf` lists the tensors."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from trainyard import json_text
from trainyard.checkpoint.plan import PlannedFile, Slice, plan_shards
from trainyard.checkpoint.reshard import OpenFile
from trainyard.checkpoint.safetensors.file import DTYPE_NAMES, DTYPES, write_tensors
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.huggingface.architecture import architecture
from trainyard.conversion.huggingface.compressed import (
    MODELOPT_CONFIG,
    Quantization,
    modelopt_document,
)
from trainyard.conversion.huggingface.config import model_document
from trainyard.conversion.huggingface.to_hf import Target, targets
from trainyard.conversion.source import Source, generation_of
from trainyard.conversion.tokenizer_files import tokenizer_of
from trainyard.errors import ArtifactError
from trainyard.tokenizers.base import Tokenizer
from trainyard.tokenizers.carried import DESCRIPTION

log = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"
WEIGHT_FILES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"),
    MODELOPT_CONFIG,
)
"""How the names of files end by which loaders find weights and their format."""

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that config.json and generation_config.json both have."""


def write_hf_folder(
    source: Source,
    num_shards: int,
    open_file: OpenFile,
    advance: Callable[[int], object] = lambda size_bytes: None,
    quantization: Quantization | None = None,
) -> None:
    """Write a model as a folder that `from_pretrained` loads. quantization: of its matrices.

    Raises ConfigError, before anything is written, if no architecture fits."""
    plain = {target.name: target for target in targets(source.config)}
    wanted = plain
    if quantization is not None:
        parts = quantization.targets(list(plain.values()), architecture(source.config))
        wanted = {part.name: part for part in parts}
    _check_sources(source, wanted)
    _warn_without_tokenizer(source)
    specs = {name: _spec(source, target) for name, target in wanted.items()}
    planned = _plan(specs, num_shards)
    for file in planned:
        with open_file(file.name) as out:
            _write(source, file, wanted, out, advance)
    if len(planned) > 1:
        _write_json(open_file, "model.safetensors.index.json", _weight_map(planned))
    files = source.tokenizer_files()
    tokenizer = tokenizer_of(files) if files else None
    special = _special_ids(tokenizer) if tokenizer is not None else {}
    generation = {**generation_of(source)} or special
    special |= {name: generation[name] for name in SPECIAL if name in generation}
    dtype = _dtype({name: _spec(source, target) for name, target in plain.items()})
    document = model_document(source.config, source.padded_vocab_size, dtype)
    if quantization is not None:
        document["quantization_config"] = quantization.document()
        if quantization.layout == "modelopt":
            _write_json(open_file, MODELOPT_CONFIG, modelopt_document())
    _write_json(open_file, "config.json", document | special)
    _write_json(open_file, "generation_config.json", generation)
    if tokenizer is None:
        return
    for name, data in tokenizer_files(source, tokenizer).items():
        with open_file(name) as out:
            out.write(data)


# --- weights ----------------------------------------------------------------------------------


def _check_sources(source: Source, wanted: dict[str, Target]) -> None:
    """Check that the export is complete: `transformers` fills a missing tensor at random."""
    used = {f"model.{target.source}" for target in wanted.values()}
    found = {name for name in source.specs if name.startswith("model.")}
    if used != found:
        raise ArtifactError(
            f"{source.url}: its tensors are not those of its config: "
            f"missing {sorted(used - found)[:5]}, unexpected {sorted(found - used)[:5]}"
        )


def _spec(source: Source, target: Target) -> TensorSpec:
    """Type and shape of a converted tensor, without reading the values."""
    ours = source.specs[f"model.{target.source}"]
    like = torch.empty(ours.shape, dtype=DTYPES[ours.dtype], device="meta")
    made = target.convert(like)
    return TensorSpec(DTYPE_NAMES[made.dtype], tuple(made.shape))


def _dtype(specs: dict[str, TensorSpec]) -> str:
    """The type of most elements, by torch's name."""
    sizes: dict[str, int] = {}
    for spec in specs.values():
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + math.prod(spec.shape)
    most = max(sorted(sizes), key=lambda dtype: sizes[dtype])
    return str(DTYPES[most]).removeprefix("torch.")


def _plan(specs: dict[str, TensorSpec], num_shards: int) -> list[PlannedFile]:
    slices = [
        Slice(name, spec.dtype, spec.shape, (0,) * len(spec.shape), spec.shape)
        for name, spec in specs.items()
    ]
    planned = plan_shards("model", slices, num_shards)
    if len(planned) == 1:
        return [PlannedFile("model.safetensors", 0, planned[0].slices)]
    return planned


def _write(
    source: Source,
    file: PlannedFile,
    wanted: dict[str, Target],
    out: Any,
    advance: Callable[[int], object],
) -> None:
    specs = {item.name: item.spec for item in file.slices}
    # Names alternate between the two stacked matrices of experts, whose parts are many.
    whole = lru_cache(maxsize=2)(source.read)

    def read(name: str) -> torch.Tensor:
        target = wanted[name]
        advance(specs[name].size_bytes)
        return target.convert(whole(f"model.{target.source}"))

    write_tensors(out, specs, read, metadata={"format": "pt"})


def _weight_map(planned: list[PlannedFile]) -> dict[str, Any]:
    total = sum(item.size_bytes for file in planned for item in file.slices)
    places = {item.name: file.name for file in planned for item in file.slices}
    return {"metadata": {"total_size": total}, "weight_map": places}


def _warn_without_tokenizer(source: Source) -> None:
    """Warn if the folder will load but cannot tokenize text."""
    carried = source.tokenizer_files()
    if "tokenizer.json" not in carried:
        why = "the tokenizer of %s has no tokenizer.json" if carried else "%s carries no tokenizer"
        log.warning(
            f"{why}, so none is exported and AutoTokenizer will fail on this folder; "
            "--tokenizer-model FOLDER exports one",
            source.url,
        )


# --- tokenizer --------------------------------------------------------------------------------


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """The ids that begin, end and pad a text."""
    begin = getattr(tokenizer, "bos", None)  # if its files name one
    ids: dict[str, Any] = {
        "bos_token_id": tokenizer.eod if begin is None else begin,
        "eos_token_id": tokenizer.eod,
    }
    if tokenizer.pad is not None:
        ids["pad_token_id"] = tokenizer.pad
    return ids


def tokenizer_files(source: Source, tokenizer: Tokenizer) -> dict[str, bytes]:
    """The carried tokenizer for `AutoTokenizer`: the same files, with the end of text named.

    {} if it has no tokenizer.json."""
    files = {name: data for name, data in source.tokenizer_files().items() if name != DESCRIPTION}
    if "tokenizer.json" not in files:
        return {}
    settings: dict[str, Any] = json_text.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    before = dict(settings)
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    settings.setdefault("eos_token", tokenizer.decode([tokenizer.eod]))
    settings.setdefault("model_max_length", source.config.positions)
    if settings == before and TOKENIZER_CONFIG in files:
        return files  # nothing was added: keep the file byte for byte
    return files | {TOKENIZER_CONFIG: _encode(settings)}


def _encode(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _write_json(open_file: OpenFile, name: str, document: dict[str, Any]) -> None:
    with open_file(name) as out:
        out.write(_encode(document))
