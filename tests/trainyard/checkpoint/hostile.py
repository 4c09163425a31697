"""A small step, and hostile hands on it: shared by the tests of what is refused.

Whoever makes a hostile step can make its manifest too, so `vouch` writes one that fits; and leaves
out the digests of blocks, as steps of older versions do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.checkpoint.samples import save
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import Manifest
from trainyard.artifacts.store import FileRecord
from trainyard.checkpoint.describe import describe
from trainyard.checkpoint.load import open_checkpoint, restore
from trainyard.errors import ArtifactError

MODEL = "model-00001-of-00001.safetensors"
NAME = "model.a"


def make_step(tmp_path: Path) -> Path:
    """The only step of a run."""
    save(str(tmp_path / "run"), {NAME: torch.arange(24.0).view(4, 6), "model.b": torch.ones(3)})
    step = tmp_path / "run" / "iter_0000050"
    text = (step / "index.json").read_text()
    (step / "index.json").write_text(re.sub(r', "digests": "\w+"', "", text))
    vouch(step)
    return step


def without_digests(index: Any) -> None:
    """An index as older versions wrote it."""
    for entry in index["tensors"].values():
        for piece in entry["pieces"]:
            piece.pop("digests", None)


def vouch(step: Path, names: list[str] | None = None) -> None:
    """A manifest for the files as they are now, as whoever changed them would write it."""
    paths = [p for p in sorted(step.rglob("*")) if p.is_file() and p.name != "manifest.json"]
    records = [
        FileRecord(name, path.stat().st_size, digest_bytes(path.read_bytes()))
        for path in paths
        if names is None or path.name in names
        for name in [path.relative_to(step).as_posix()]
    ]
    manifest = Manifest(stage="pretrain", files=tuple(records))
    (step / "manifest.json").write_text(json.dumps(manifest.to_document()))


def edited(step: Path, name: str, change: Callable[[Any], object]) -> None:
    """Change a document in place, and vouch for it."""
    document = json.loads((step / name).read_text())
    change(document)
    (step / name).write_text(json.dumps(document))
    if name != "manifest.json":
        vouch(step)


def load(step: Path) -> None:
    """What a trainer and the tools do with a step."""
    targets = {NAME: torch.zeros(4, 6), "model.b": torch.zeros(3)}
    with open_checkpoint(str(step)) as checkpoint:
        describe(checkpoint)
        restore(checkpoint, dict(targets), "model.")
        for name in checkpoint.names():
            checkpoint.read(name)


def refusal(step: Path) -> str:
    """What loading it says."""
    with pytest.raises(ArtifactError) as caught:
        load(step)
    return str(caught.value)


def refuses_to_read(step: Path) -> str:
    """What reading a tensor of it says."""
    with pytest.raises(ArtifactError) as caught, open_checkpoint(str(step)) as checkpoint:
        checkpoint.read(NAME)
    return str(caught.value)
