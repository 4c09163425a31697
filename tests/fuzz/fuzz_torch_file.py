"""Any file of torch.save, of either layout, gives tensors within it or an ArtifactError."""

from __future__ import annotations

import functools
import io

import atheris
from common import fuzz, only, scratch

with atheris.instrument_imports(include=["trainyard.conversion"]):
    from trainyard.conversion.torch_save import file as torch_file

import torch

from trainyard.conversion.torch_save.pickles import unpickle
from trainyard.errors import ArtifactError

FOLDER = scratch()


@functools.lru_cache(maxsize=500)
def answer(data: bytes, layout: str) -> object:
    """A process of its own for every pickle takes longest: most inputs change what is around it."""
    try:
        return unpickle(data, "x.pt", layout=layout)
    except ArtifactError as error:
        return error


def remembered(data: bytes, url: str, *, allow: object = (), layout: str = "plain") -> object:
    found = answer(bytes(data), layout)
    if isinstance(found, ArtifactError):
        raise found
    return found


def target(data: bytes) -> None:
    path = FOLDER / "a.pt"
    path.write_bytes(data)
    with only(ArtifactError), torch_file.TorchFile(str(path)) as file:
        for ref in torch_file.tensor_refs(file.tree):
            with only(ArtifactError):
                file.check(ref)
                tensor = file.read(ref)
                assert tuple(tensor.shape) == ref.shape
                assert tensor.nbytes <= ref.storage_bytes <= len(data)


def small(**saving: bool) -> bytes:
    buffer, out = torch.arange(12, dtype=torch.int16), io.BytesIO()
    tree = {"a": torch.ones(2, 3), "b": [buffer[2:8].view(2, 3).t(), buffer], "c": torch.empty(0)}
    torch.save(tree, out, **saving)
    return out.getvalue()


if __name__ == "__main__":
    torch_file.unpickle = remembered
    fuzz(target, [small(), small(_use_new_zipfile_serialization=False)])
