"""A damaged or misleading foreign checkpoint fails with a named error and no loadable output."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stages.directly import run_program
from tests.stages.test_reshard import UNTIED, reshard
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from trainyard.checkpoint.load import open_checkpoint
from trainyard.errors import ArtifactError, ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def flip_a_weight(folder: Path) -> None:
    """In the middle of what is by far the largest file."""
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def share_bytes(folder: Path) -> None:
    """All tensors of one shape at the range of one of them."""
    (path,) = folder.rglob(".metadata")
    metadata = pickle.loads(path.read_bytes())
    first: dict[tuple[int, ...], Any] = {}
    for key in metadata.storage_data:
        if key.offset is not None:
            shape = tuple(metadata.state_dict_metadata[key.fqn].chunks[0].sizes)
            metadata.storage_data[key] = first.setdefault(shape, metadata.storage_data[key])
    path.write_bytes(pickle.dumps(metadata))


def tell_layers(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 10**9}))


@pytest.mark.parametrize(
    ("saver", "spoil", "words"),
    [
        ("hf", tell_layers, r"config\.json: says 1000000000 layers"),
        ("core", flip_a_weight, r"record at byte \d+ has CRC-32"),
        ("torch_dist", flip_a_weight, r"record at byte \d+ has CRC-32"),
        ("torch_dist", share_bytes, r"share the bytes of __0_0\.distcp"),
    ],
)
def test_inconsistent_checkpoints_are_not_converted(
    tmp_path: Path, saver: str, spoil: Callable[[Path], None], words: str
) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(UNTIED))
    reshard(tmp_path / "run", tmp_path / "theirs", saver=saver)
    reshard(tmp_path / "theirs", tmp_path / "sound")
    spoil(tmp_path / "theirs")
    with pytest.raises(ArtifactError, match=words):
        reshard(tmp_path / "theirs", tmp_path / "out")
    with pytest.raises((ArtifactError, ConfigError)):
        open_checkpoint(str(tmp_path / "out"))


def test_a_folder_of_another_model_type_ends_with_status_2(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(UNTIED))
    reshard(tmp_path / "run", tmp_path / "theirs", saver="hf")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "other"}))
    line = ["--load-dir", str(tmp_path / "theirs"), "--save-dir", str(tmp_path / "made")]
    done = run_program("stages.reshard", *line, expect=2)
    assert "model_type is 'other'; this version reads LlamaForCausalLM (model_type " in done.err
    assert not (tmp_path / "made").exists()
