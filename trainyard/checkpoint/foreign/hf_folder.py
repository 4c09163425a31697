"""Writing the Hugging Face folder: sharded safetensors with their index, configs, tokenizer.

    model-0000k-of-0000N.safetensors, model.safetensors.index.json   (one shard: model.safetensors)
    config.json  generation_config.json  tokenizer.json  tokenizer_config.json  ...

Streams one tensor at a time. Which tensors there are, `foreign.hf` knows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import torch

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.foreign.hf import Target, targets
from trainyard.checkpoint.foreign.hf_config import model_document
from trainyard.checkpoint.gpt import checkpoint_tokenizer, gpt_config
from trainyard.checkpoint.layout import PlannedFile, Slice
from trainyard.checkpoint.load import Checkpoint
from trainyard.checkpoint.rewrite import OpenFile, plan_shards
from trainyard.checkpoint.tensorfile import DTYPES, TensorSpec, write_tensors
from trainyard.errors import ArtifactError
from trainyard.tokenizers.base import DESCRIPTION, Tokenizer

log = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"


def write_hf_folder(
    checkpoint: Checkpoint,
    num_shards: int,
    open_file: OpenFile,
    advance: Callable[[int], object] = lambda size_bytes: None,
) -> None:
    """Write the model of a checkpoint as a folder that `from_pretrained` loads.

    Raises ConfigError, before anything is written, when no architecture fits."""
    config, vocab_size = gpt_config(checkpoint)
    wanted = {target.name: target for target in targets(config)}
    _check_sources(checkpoint, wanted)
    specs = {name: _spec(checkpoint, target) for name, target in wanted.items()}
    planned = _plan(specs, num_shards)
    for file in planned:
        with open_file(file.name) as out:
            _write(checkpoint, file, wanted, out, advance)
    if len(planned) > 1:
        _write_json(open_file, "model.safetensors.index.json", _weight_map(planned))
    (dtype,) = {spec.dtype for spec in specs.values()}
    tokenizer = checkpoint_tokenizer(checkpoint)
    special = _special_ids(tokenizer)
    document = model_document(config, vocab_size, str(DTYPES[dtype]).removeprefix("torch."))
    _write_json(open_file, "config.json", document | special)
    _write_json(open_file, "generation_config.json", special)
    for name, data in tokenizer_files(checkpoint, tokenizer, config.positions).items():
        with open_file(name) as out:
            out.write(data)


# --- weights ----------------------------------------------------------------------------------


def _check_sources(checkpoint: Checkpoint, wanted: dict[str, Target]) -> None:
    """What is exported must be all of the model: a forgotten tensor would be a random one."""
    used = {f"model.{target.source}" for target in wanted.values()}
    held = set(checkpoint.names("model."))
    if used != held:
        raise ArtifactError(
            f"{checkpoint.url}: its tensors are not those of its config: "
            f"missing {sorted(used - held)[:5]}, unexpected {sorted(held - used)[:5]}"
        )


def _spec(checkpoint: Checkpoint, target: Target) -> TensorSpec:
    """Type and shape of a converted tensor, found without reading the values."""
    source = checkpoint.spec(f"model.{target.source}")
    shape = target.convert(torch.empty(source.shape, device="meta")).shape
    return TensorSpec(source.dtype, tuple(shape))


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
    checkpoint: Checkpoint,
    file: PlannedFile,
    wanted: dict[str, Target],
    out: Any,
    advance: Callable[[int], object],
) -> None:
    specs = {item.name: item.spec for item in file.slices}

    def read(name: str) -> torch.Tensor:
        target = wanted[name]
        advance(specs[name].size_bytes)
        return target.convert(checkpoint.read(f"model.{target.source}"))

    write_tensors(out, specs, read, metadata={"format": "pt"})


def _weight_map(planned: list[PlannedFile]) -> dict[str, Any]:
    total = sum(item.size_bytes for file in planned for item in file.slices)
    places = {item.name: file.name for file in planned for item in file.slices}
    return {"metadata": {"total_size": total}, "weight_map": places}


# --- tokenizer --------------------------------------------------------------------------------


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    ids: dict[str, Any] = {"bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod}
    if tokenizer.pad is not None:
        ids["pad_token_id"] = tokenizer.pad
    return ids


def tokenizer_files(
    checkpoint: Checkpoint, tokenizer: Tokenizer, max_length: int
) -> dict[str, bytes]:
    """The carried tokenizer as `AutoTokenizer` wants it: the same files, the end of text named."""
    files = {
        name: store.read_bytes(join(checkpoint.tokenizer_url, name))
        for name in store.list_files(checkpoint.tokenizer_url)
        if name != DESCRIPTION
    }
    if "tokenizer.json" not in files:
        log.warning("the tokenizer of %s has no tokenizer.json; none is exported", checkpoint.url)
        return {}
    settings: dict[str, Any] = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    settings.setdefault("eos_token", tokenizer.decode([tokenizer.eod]))
    settings.setdefault("model_max_length", max_length)
    return files | {TOKENIZER_CONFIG: _encode(settings)}


def _encode(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _write_json(open_file: OpenFile, name: str, document: dict[str, Any]) -> None:
    with open_file(name) as out:
        out.write(_encode(document))
