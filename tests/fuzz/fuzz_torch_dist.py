"""Any `.metadata` and `.distcp` give tensors that share no byte, or an ArtifactError."""

from __future__ import annotations

import functools
import json
import warnings
from contextlib import closing

import atheris
from common import fuzz, only, scratch

with atheris.instrument_imports(include=["trainyard.conversion"]):
    from trainyard.conversion.torch_dist import index as torch_dist_index
    from trainyard.conversion.torch_dist import tensors as torch_dist_tensors
    from trainyard.conversion.torch_save import pickles

import torch
from torch.distributed import checkpoint as dcp

from trainyard.errors import ArtifactError

FOLDER = scratch()
FILE, METADATA = FOLDER / "__0_0.distcp", FOLDER / ".metadata"
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}

ask = pickles._ask


@functools.lru_cache(maxsize=500)
def answer(data: bytes, task: str) -> str:
    """A process of its own for every pickle takes longest; most files have the same."""
    try:
        return json.dumps(ask(data, task, "x"))
    except ArtifactError as error:
        return json.dumps({"error": str(error)})


def remembered(data: bytes, task: str, url: str) -> object:
    return json.loads(answer(bytes(data), task))


def told(text: bytes) -> None:
    """Let the process that reads pickles say this of the index."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict):
        pickles._ask = lambda data, task, url: found
        try:
            with only(ArtifactError):
                check(torch_dist_index.read_index(str(METADATA)))
        finally:
            pickles._ask = remembered


def check(index: torch_dist_index.StoredIndex) -> None:
    """Read everything that it says is there."""
    pickles._ask = remembered
    with closing(torch_dist_tensors.StoredTensors(str(FOLDER), index.tensors)) as files:
        size = 0
        for name, tensor in index.tensors.items():
            shape = tensor.logical_shape
            if 0 not in shape:
                found = files.read(name, (0,) * len(shape), shape)
                assert tuple(found.shape) == shape
                size += found.nbytes
    assert size <= FILE.stat().st_size


def target(data: bytes) -> None:
    """The first byte says what the rest is: the index, what its reader tells of it, or tensors."""
    kind, rest = data[:1], data[1:]
    if kind == b"a":
        told(rest)
    elif kind:
        path = METADATA if kind == b"m" else FILE
        path.write_bytes(rest)
        with only(ArtifactError):
            check(torch_dist_index.read_index(str(METADATA)))
        path.write_bytes(SOUND[path])


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(FOLDER, sync_files=False)
        dcp.save(TENSORS, storage_writer=writer, no_dist=True)
    SOUND = {path: path.read_bytes() for path in (METADATA, FILE)}
    pickles._ask = remembered
    limits = {**pickles.LIMITS, **torch_dist_index.LIMITS}
    allow = sorted(torch_dist_index.ALLOWED)
    task = json.dumps({"layout": "plain", "allow": allow, "limits": limits})
    text = answer(SOUND[METADATA], task).encode()
    fuzz(target, [b"a" + text, b"m" + SOUND[METADATA], b"f" + SOUND[FILE]])
