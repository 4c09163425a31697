"""What is saved is what is read, at any number of files; what is not whole does not exist."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.trainyard.checkpoint.hostile import edited
from tests.trainyard.checkpoint.samples import save, some_tensors
from trainyard.artifacts import store
from trainyard.artifacts.manifest import read_manifest
from trainyard.checkpoint import save as save_module
from trainyard.checkpoint.layout import ShardedTensor
from trainyard.checkpoint.load import open_checkpoint, restore
from trainyard.checkpoint.steps import find_steps
from trainyard.errors import ArtifactError, ConfigError, InfrastructureError


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}


@pytest.mark.parametrize("shard_size_bytes", [2**32, 700, 100])
def test_round_trip_at_any_number_of_files(tmp_path: Path, shard_size_bytes: int) -> None:
    tensors = some_tensors()
    save(str(tmp_path), tensors, shard_size_bytes=shard_size_bytes)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.names() == sorted(tensors)
        for name, tensor in tensors.items():
            read = checkpoint.read(name)
            assert read.dtype == tensor.dtype
            assert torch.equal(read, tensor), name
        part = checkpoint.read_slice("model.embedding.weight", (7, 2), (30, 5))
        assert torch.equal(part, tensors["model.embedding.weight"][7:37, 2:7])
        assert checkpoint.step == 50
        assert checkpoint.state["consumed_samples"] == 200
        assert checkpoint.config == {"format_version": 1, "model": {}}


def test_files_written_at_once_are_those_written_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = some_tensors()
    records = [save(str(tmp_path / "turn"), tensors, shard_size_bytes=500)]
    monkeypatch.setattr(save_module, "WORTH_THREADS_BYTES", 0)
    records.append(save(str(tmp_path / "once"), tensors, shard_size_bytes=500))
    assert len([record for record in records[0] if "optimizer" in record.path]) > 4
    digests = [{r.path: r.digest for r in found if not r.volatile} for found in records]
    assert digests[0] == digests[1]
    full = mock.Mock(side_effect=OSError(errno.EDQUOT, "quota is used up"))
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InfrastructureError, match=r"safetensors: publish failed: .*quota"):
        save(str(tmp_path / "torn"), tensors, shard_size_bytes=500)
    assert list((tmp_path / "torn").rglob("[a-z]*.*")) == []


@pytest.mark.slow
def test_round_trip_in_an_object_store(s3_url: str) -> None:
    tensors = some_tensors()
    save(s3_url, tensors, shard_size_bytes=700)
    save(s3_url, tensors, step=100)
    assert find_steps(s3_url) == [50, 100]
    with open_checkpoint(f"{s3_url}/iter_0000050") as checkpoint:
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read(name), tensor), name


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    tensors = some_tensors()
    save(str(tmp_path / "a"), tensors)
    save(str(tmp_path / "b"), dict(reversed(tensors.items())))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    save(str(tmp_path / "c"), some_tensors(seed=1))
    digests = [open_checkpoint(str(tmp_path / name)).digest for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_the_records_are_those_of_the_files(tmp_path: Path) -> None:
    records = save(str(tmp_path), some_tensors())
    on_disk = store.list_files(str(tmp_path))
    assert {r.path: r.size_bytes for r in records} == on_disk
    assert [r.path for r in records if r.volatile] == ["iter_0000050/manifest.json"]
    names = {path.removeprefix("iter_0000050/") for path in on_disk}
    assert {"model-00001-of-00001.safetensors", "rng-00001-of-00001.safetensors"} <= names
    assert {"index.json", "state.json", "config.json", "ledger.jsonl"} <= names


def test_slices_of_several_ranks_read_as_one_tensor(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    halves = {
        f"model.w{cut}": ShardedTensor(f"model.w{cut}", whole, (4, 6), (0, 0)) for cut in "ab"
    }
    save(str(tmp_path), halves, shard_size_bytes=30)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert len(checkpoint.index["model.wa"].pieces) == 4
        assert torch.equal(checkpoint.read("model.wa"), whole)
        assert torch.equal(checkpoint.read_slice("model.wb", (1, 1), (2, 4)), whole[1:3, 1:5])


# --- steps that exist -----------------------------------------------------------------------------


def test_only_a_step_with_a_manifest_exists(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        save(str(tmp_path), some_tensors(), step, lineage="old" if step == 50 else "new")
    (tmp_path / "iter_0000150" / "manifest.json").unlink()
    assert find_steps(str(tmp_path)) == [50, 100]
    assert find_steps(str(tmp_path), lineage="old") == [50]
    assert find_steps(str(tmp_path / "nowhere")) == []
    assert open_checkpoint(str(tmp_path)).step == 100
    assert open_checkpoint(f"{tmp_path}/iter_0000050/").step == 50


def test_replacing_a_step_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    save(str(tmp_path), some_tensors(), lineage="old", shard_size_bytes=300)
    save(str(tmp_path), {"model.a": torch.ones(3)}, lineage="new")
    names = set(store.list_files(str(tmp_path / "iter_0000050")))
    assert "model-00001-of-00001.safetensors" in names
    assert not any(name.startswith(("optimizer", "rng")) for name in names)
    assert find_steps(str(tmp_path), lineage="new") == [50]


def test_a_step_that_failed_to_be_replaced_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(str(tmp_path), some_tensors(), lineage="old")

    def kill(operation: str, url: str) -> None:
        if operation == "publish" and "optimizer" in url:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "observers", [kill])
        with pytest.raises(KeyboardInterrupt):
            save(str(tmp_path), some_tensors(seed=1), lineage="new")
    assert find_steps(str(tmp_path)) == []
    with pytest.raises(ConfigError, match=r"--load .*save did not finish"):
        open_checkpoint(str(tmp_path))
    save(str(tmp_path), some_tensors(seed=1), lineage="new")
    assert find_steps(str(tmp_path)) == [50]


# --- refusals -------------------------------------------------------------------------------------


def test_a_wrong_path_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"--load .*: no checkpoint there; "):
        open_checkpoint(str(tmp_path / "nowhere"))
    for name, words in [
        ("latest_checkpointed_iteration.txt", "Megatron-LM"),
        ("notes.txt", r"found notes\.txt"),
        ("iter_0000010/model.safetensors", r"iter_0000010 without a manifest\.json"),
    ]:
        folder = tmp_path / name.replace("/", "-")
        store.write_bytes(str(folder / name), b"1")
        with pytest.raises(ConfigError, match=words):
            open_checkpoint(str(folder))
    with pytest.raises(ConfigError, match=r"--load-dir .*is a file"):
        open_checkpoint(str(tmp_path / "notes.txt" / "notes.txt"), "--load-dir")
    for name in ("config.json", "model.safetensors"):
        store.write_bytes(str(tmp_path / "hf" / name), b"{}")
    with pytest.raises(ConfigError, match="Hugging Face"):
        open_checkpoint(str(tmp_path / "hf"))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save(str(tmp_path), some_tensors())
    path = tmp_path / "iter_0000050" / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with (
        open_checkpoint(str(tmp_path)) as checkpoint,
        pytest.raises(ArtifactError, match=r"model-00001-of-00001\.safetensors.*truncated"),
    ):
        checkpoint.read("model.scale")


def test_a_file_that_holds_another_tensor_is_named(tmp_path: Path) -> None:
    save(str(tmp_path), {"model.a": torch.ones(3), "model.b": torch.ones(4)})
    step = tmp_path / "iter_0000050"
    edited(step, "index.json", lambda d: d["tensors"]["model.a"]["pieces"][0].update(key="model.b"))
    with (
        open_checkpoint(str(tmp_path)) as checkpoint,
        pytest.raises(ArtifactError, match=r"'model.b' is F32 \[3\], the file holds F32 \[4\]"),
    ):
        checkpoint.read("model.a")


@pytest.mark.parametrize("name", ["state.json", "index.json", "config.json"])
def test_a_newer_format_is_refused_in_words(tmp_path: Path, name: str) -> None:
    save(str(tmp_path), some_tensors())
    edited(tmp_path / "iter_0000050", name, lambda d: d.update(format_version=9))
    with pytest.raises(ArtifactError, match=f"{name}: format_version 9 is newer"):
        _ = open_checkpoint(str(tmp_path)).config


def test_a_renamed_step_is_refused(tmp_path: Path) -> None:
    save(str(tmp_path), some_tensors())
    (tmp_path / "iter_0000050").rename(tmp_path / "iter_0000060")
    with pytest.raises(ArtifactError, match="says step 50"):
        open_checkpoint(str(tmp_path))


def test_tensors_that_do_not_fit_are_listed_and_nothing_changes(tmp_path: Path) -> None:
    held = {f"model.{i:02d}": torch.ones(2) for i in range(30)}
    save(str(tmp_path), held)
    wanted = {f"model.{i:02d}": torch.zeros(2) for i in range(25, 40)}
    wanted["model.25"] = torch.zeros(3)
    with pytest.raises(ArtifactError) as caught:
        restore(open_checkpoint(str(tmp_path)), wanted, "model.")
    text = str(caught.value)
    assert "10 missing:\n    model.30" in text
    assert "25 unexpected:\n    model.00" in text
    assert "... and 5 more" in text
    assert "1 of another shape or type:\n    model.25 is [2], wanted [3]" in text
    assert not any(tensor.any() for tensor in wanted.values())


def test_restore_fills_tensors_and_slices_in_place(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    save(str(tmp_path), {"model.a": whole, "model.b": torch.ones(2), "optimizer.x": whole})
    b, columns = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3, 2)
    shard = ShardedTensor("model.a", columns, (3, 4), (0, 1))
    restore(open_checkpoint(str(tmp_path)), {"model.a": shard, "model.b": b}, "model.")
    assert torch.equal(columns, whole[:, 1:3])
    assert torch.equal(b, torch.ones(2, dtype=torch.bfloat16))


def test_the_manifest_names_stage_and_lineage_and_no_pickle(tmp_path: Path) -> None:
    save(str(tmp_path), some_tensors(), lineage="abc")
    found = read_manifest(str(tmp_path / "iter_0000050" / "manifest.json"))
    assert found is not None
    assert (found[0].stage, found[0].lineage) == ("pretrain", "abc")
    endings = {record.path.rpartition(".")[2] for record in found[0].files}
    assert endings == {"safetensors", "json", "jsonl"}
