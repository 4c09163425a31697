"""What each level of --verify-checkpoint sees, and what it costs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.trainyard.checkpoint.hostile import edited, without_digests
from tests.trainyard.checkpoint.samples import save, some_tensors
from trainyard.artifacts import store
from trainyard.checkpoint.load import open_checkpoint, restore
from trainyard.checkpoint.safetensors.file import TensorFile
from trainyard.checkpoint.stored_step import Verify
from trainyard.errors import ArtifactError

MODEL = "model-00001-of-00001.safetensors"
LEVELS: list[Verify] = ["none", "sizes", "digests"]


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    save(str(tmp_path), some_tensors())
    return tmp_path / "iter_0000050"


def targets() -> dict[str, torch.Tensor]:
    held = {n: t for n, t in some_tensors().items() if n.startswith("model.")}
    return {name: torch.zeros_like(tensor) for name, tensor in held.items()}


@pytest.mark.parametrize("verify", LEVELS)
def test_every_level_reads_what_is_whole(step: Path, verify: Verify) -> None:
    held = targets()
    with open_checkpoint(str(step), verify=verify) as checkpoint:
        checkpoint.check()
        restore(checkpoint, dict(held), "model.")
    assert all(torch.equal(held[name], some_tensors()[name]) for name in held)


@pytest.mark.parametrize("verify", LEVELS)
def test_a_flipped_bit_is_seen_by_digests_before_anything_is_changed(
    step: Path, verify: Verify
) -> None:
    flip_last_byte(step / MODEL)
    held = targets()
    with open_checkpoint(str(step), verify=verify) as checkpoint:
        if verify == "none":
            restore(checkpoint, dict(held), "model.")
            assert any(tensor.any() for tensor in held.values())
            return
        if verify == "sizes":
            with pytest.raises(ArtifactError, match=rf"{MODEL}: tensor 'model.*' is damaged: byte"):
                restore(checkpoint, dict(held), "model.")
            checkpoint.check()  # reads no values
            return
        with pytest.raises(ArtifactError, match=rf"{MODEL}: digest .*, manifest\.json says"):
            restore(checkpoint, dict(held), "model.")
        with pytest.raises(ArtifactError, match=MODEL):  # nor when it is asked again
            checkpoint.read("model.scale")
        with pytest.raises(ArtifactError, match=MODEL):
            checkpoint.check()
    assert not any(tensor.any() for tensor in held.values())


@pytest.mark.parametrize("name", ["index.json", "state.json", "config.json"])
@pytest.mark.parametrize("verify", LEVELS)
def test_documents_are_those_of_the_manifest_at_every_level(
    step: Path, name: str, verify: Verify
) -> None:
    data = (step / name).read_bytes()
    for spoiled, words in (
        (data.replace(b" ", b"\t", 1), "digest .*, manifest.json says"),
        (data + b" ", f"{len(data) + 1} bytes, manifest.json says {len(data)} bytes"),
        (data[:-1], f"{len(data) - 1} bytes, manifest.json says"),
    ):
        (step / name).write_bytes(spoiled)
        with pytest.raises(ArtifactError, match=f"{name}: {words}"):
            _ = open_checkpoint(str(step), verify=verify).config


def test_sizes_see_what_is_gone_or_longer_also_where_it_is_not_read(step: Path) -> None:
    (step / "ledger.jsonl").unlink()
    with open_checkpoint(str(step), verify="none") as checkpoint:
        checkpoint.check()
    with (
        open_checkpoint(str(step)) as checkpoint,
        pytest.raises(ArtifactError, match=r"ledger\.jsonl: missing, manifest\.json says 13 bytes"),
    ):
        checkpoint.check()


def test_without_any_check_a_file_of_another_size_is_read_if_it_is_sound(
    step: Path, tmp_path: Path
) -> None:
    other = {**some_tensors(1), "model.more": torch.ones(100)}
    save(str(tmp_path / "other"), other)
    (step / MODEL).write_bytes((tmp_path / "other" / step.name / MODEL).read_bytes())
    with pytest.raises(ArtifactError, match=f"{MODEL}: .* bytes, manifest.json says"):
        open_checkpoint(str(step)).read("model.scale")
    read = open_checkpoint(str(step), verify="none").read("model.scale")
    assert torch.equal(read, other["model.scale"])


def test_a_file_is_read_once_more_at_most_and_only_if_it_is_used(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    read = TensorFile._read

    def counting(self: TensorFile, begin: int, memory: memoryview) -> None:
        counts[store.basename(self.url)] += len(memory)
        read(self, begin, memory)

    monkeypatch.setattr(TensorFile, "_read", counting)
    flip_last_byte(step / "optimizer-00001-of-00001.safetensors")
    with open_checkpoint(str(step), verify="digests") as checkpoint:
        restore(checkpoint, dict(targets()), "model.")
        restore(checkpoint, dict(targets()), "model.")
    size = (step / MODEL).stat().st_size
    values = sum(tensor.nbytes for tensor in targets().values())
    assert set(counts) == {MODEL}
    assert counts[MODEL] == size + (size - values) + 2 * values


@pytest.mark.parametrize("verify", LEVELS)
def test_a_step_without_digests_of_blocks_is_compared_file_by_file(
    step: Path, verify: Verify
) -> None:
    edited(step, "index.json", without_digests)
    with open_checkpoint(str(step), verify=verify) as checkpoint:
        restore(checkpoint, dict(targets()), "model.")
    flip_last_byte(step / MODEL)
    with open_checkpoint(str(step), verify=verify) as checkpoint:
        if verify == "none":
            checkpoint.read("model.scale")
            return
        with pytest.raises(ArtifactError, match=rf"{MODEL}: digest .*, manifest\.json says"):
            checkpoint.read("model.scale")
