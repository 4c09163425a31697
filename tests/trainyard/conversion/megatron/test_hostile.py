"""Inconsistent Megatron-LM files are refused before a tensor is read."""

from __future__ import annotations

import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from tests.trainyard.checkpoint.samples import random_gpt
from tests.trainyard.conversion.megatron import megatron_files
from tests.trainyard.conversion.torch_dist import torch_dist_files
from trainyard.conversion.loaders import LOADERS, open_source
from trainyard.conversion.torch_dist.index import read_index
from trainyard.conversion.write_native import SCHEDULER
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.config import GPTConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(20)]  # one that builds what it reads runs on

GPT = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8)

SCHEDULE = {
    **dict.fromkeys(SCHEDULER, 0.5),
    **{"num_steps": 48, "lr_decay_style": "cosine", "wd_incr_style": "constant"},
}

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    model = random_gpt(GPT)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> Path:
    """A sound checkpoint in the torch format, whose args torch.load can read anywhere."""
    layout = megatron_files.Layout(step=100)
    root = megatron_files.write(tmp_path_factory.mktemp("ranks") / "m", weights, GPT, layout)
    with megatron_files.megatron_modules():
        edited(root, lambda tree: vars(tree["args"]).pop("attention_backend"))
    return root


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> Path:
    """A sound torch_dist checkpoint."""
    layout = torch_dist_files.Layout(own_class=False, step=100)
    root = tmp_path_factory.mktemp("dist") / "m"
    torch_dist_files.write(root, weights, GPT, layout)
    with megatron_files.megatron_modules():
        edited(root, lambda tree: vars(tree["args"]).pop("attention_backend"))
    return root


def edited(root: Path, edit: Edit) -> None:
    """Change what the files of a checkpoint say."""
    for path in (*root.rglob("model_optim_rng.pt"), *root.rglob("common.pt")):
        tree = torch.load(path, weights_only=False)
        edit(tree)
        torch.save(tree, path)


def copied(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "m")
    return tmp_path / "m"


# --- how far the run was --------------------------------------------------------------------------


def test_what_is_sound_is_read(ranks: Path, dist: Path) -> None:
    for root, loader in ((ranks, "core"), (dist, "torch_dist")):
        with open_source(str(root), loader) as source:
            assert (source.step, source.consumed_train_samples) == (100, 6400)


def test_a_release_may_be_of_any_iteration(ranks: Path, tmp_path: Path) -> None:
    root = copied(ranks, tmp_path)
    (root / "iter_0000100").rename(root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    with open_source(str(root), "core") as source:
        assert source.step == 0


@pytest.mark.parametrize("loader", ["core", "torch_dist"])
def test_a_folder_of_another_iteration_than_its_files_is_refused(
    ranks: Path, dist: Path, tmp_path: Path, loader: str
) -> None:
    root = copied(dist if loader == "torch_dist" else ranks, tmp_path)
    (root / "iter_0000100").rename(root / "iter_0000007")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    for url in (root, root / "iter_0000007"):
        with pytest.raises(ArtifactError, match=r"has iteration 100, .* folder of iteration 7"):
            open_source(str(url), loader)


def scheduled(**changes: Any) -> Edit:
    return lambda tree: tree.update(opt_param_scheduler={**SCHEDULE, **changes})


NAME = "decoder.layers.0.mlp.linear_fc1.weight"

LIES: list[tuple[Edit, str]] = [
    (lambda tree: vars(tree["args"]).update(consumed_train_samples=-5), "train_samples is -5"),
    (lambda tree: vars(tree["args"]).update(consumed_train_samples="9"), "train_samples is '9'"),
    (lambda tree: tree.update(iteration=-100), "iteration is -100, wanted a number from 0 on"),
    (lambda tree: tree.update(iteration=100.0), r"iteration is 100\.0, wanted a number"),
    (scheduled(max_lr=math.nan), "max_lr of its schedule is nan"),
    (scheduled(min_lr=-math.inf), "min_lr of its schedule is -inf"),
    (scheduled(start_wd="a"), "start_wd of its schedule is 'a'"),
    (scheduled(num_steps=-1), "num_steps is -1"),
    (scheduled(lr_decay_style=3), "lr_decay_style of its schedule is 3"),
    (scheduled(wd_incr_style="\x1b[2J"), r"wd_incr_style of its schedule is '\\x1b"),
    (lambda tree: vars(tree["args"]).update(num_layers=10**9), "says 1000000000 layers"),
    (lambda tree: vars(tree["args"]).update(window_size=5), "window_size 5 and"),
    (lambda tree: vars(tree["args"]).update(num_attention_heads=0), "describes no model"),
    (lambda tree: tree["model"].update({"decoder.\x1b[2J\n": torch.ones(2)}), r"decoder\.\\x1b"),
    (
        lambda tree: tree["model"].update({f"decoder.layers.{'9' * 5000}.x": torch.ones(2)}),
        r"1 unexpected:\n    'decoder\.layers\.9+",
    ),
    (
        lambda tree: tree.update({"model0": tree.pop("model"), f"model{10**8}": {}}),
        "at most 4096 are read",
    ),
    (lambda tree: tree["model"].update({NAME: torch.ones(1).expand(64, 16)}), "repeats values"),
]


@pytest.mark.parametrize(("edit", "words"), LIES)
def test_values_that_no_run_has_are_refused(
    ranks: Path, tmp_path: Path, edit: Edit, words: str
) -> None:
    root = copied(ranks, tmp_path)
    edited(root, edit)
    with pytest.raises(ArtifactError, match=words) as caught:
        open_source(str(root), "core")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": 5},
        {"optimizer": {"param_groups": 3, "state": 4}},
        {"optimizer": {"state": {"common_step": torch.tensor(math.nan)}}},
    ],
)
def test_an_empty_optimizer_is_ignored(
    dist: Path, tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    root = copied(dist, tmp_path)
    edited(root, lambda tree: tree.update(optimizer=optimizer))
    with open_source(str(root), "torch_dist") as source:
        assert source.num_updates == 0


def test_a_schedule_may_have_fractions_of_steps(ranks: Path, tmp_path: Path) -> None:
    root = copied(ranks, tmp_path)
    edited(root, scheduled(lr_warmup_steps=12.5))  # a fraction of the steps may be one
    with open_source(str(root), "core") as source:
        assert getattr(source, "scheduler", {})["lr_warmup_steps"] == 12.5


# --- tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a tensor of its own", "part of a buffer", "torch_dist"])
def test_a_flipped_bit_is_found(ranks: Path, dist: Path, tmp_path: Path, kind: str) -> None:
    """Archives keep a CRC-32 of each record, which is compared while it is read."""
    is_dist = kind == "torch_dist"
    root, loader = copied(dist if is_dist else ranks, tmp_path), "torch_dist" if is_dist else "core"

    def share(tree: dict[str, Any]) -> None:
        buffer = torch.cat([tree["model"][NAME].reshape(-1), torch.zeros(1000)])
        tree["model"][NAME] = buffer[: 64 * 16].view(64, 16)

    if kind == "part of a buffer":
        edited(root, share)
    path = root / "iter_0000100" / ("__0_0.distcp" if is_dist else "mp_rank_00/model_optim_rng.pt")
    with open_source(str(root), loader) as source:
        wanted = source.read(f"model.{NAME}")
    data = bytearray(path.read_bytes())
    at = data.index(wanted.numpy().tobytes())
    data[at + wanted.nbytes // 2] ^= 1
    path.write_bytes(data)
    with open_source(str(root), loader) as source:
        source.read("model.decoder.final_layernorm.weight")
        with pytest.raises(ArtifactError, match=r"record at byte \d+ has CRC-32 .*is damaged"):
            source.read(f"model.{NAME}")


def test_records_without_a_checksum_are_not_checked(ranks: Path, tmp_path: Path) -> None:
    root = copied(ranks, tmp_path)
    torch.serialization.set_crc32_options(False)
    try:
        edited(root, lambda tree: None)
    finally:
        torch.serialization.set_crc32_options(True)
    with open_source(str(root), "core") as source, open_source(str(ranks), "core") as sound:
        assert all(torch.equal(source.read(name), sound.read(name)) for name in sound.specs)


# --- the bytes of .distcp files -------------------------------------------------------------------


def indexed(root: Path, change: Callable[[Any], object]) -> Path:
    """The index of a checkpoint, changed."""
    path = root / "iter_0000100/.metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return path


def place_of(metadata: Any, name: str) -> Any:
    (index,) = (key for key in metadata.storage_data if key.fqn == name)
    return metadata.storage_data[index]


FINAL = ("decoder.final_layernorm.bias", "decoder.final_layernorm.weight")


def one_for_all(metadata: Any) -> None:
    """Two tensors of one shape at one range: every check of boxes and of the archive passes."""
    first = place_of(metadata, FINAL[0])
    metadata.storage_data[MetadataIndex(FINAL[1], (0,))] = first


def reach_into_the_next(metadata: Any) -> None:
    first = min(metadata.storage_data.values(), key=lambda place: place.offset)
    first.length += 1


def reach_into_an_object(metadata: Any) -> None:
    (taken,) = (k for k in metadata.storage_data if k.offset is None and "fc1" in k.fqn)
    metadata.storage_data[taken] = place_of(metadata, FINAL[0])


@pytest.mark.parametrize("change", [one_for_all, reach_into_the_next, reach_into_an_object])
def test_items_that_share_bytes_are_refused(dist: Path, tmp_path: Path, change: Any) -> None:
    path = indexed(copied(dist, tmp_path), change)
    with pytest.raises(ArtifactError, match=r"share the bytes of __0_0\.distcp from \d+ on"):
        read_index(str(path))


def test_more_dims_than_a_tensor_has_are_refused(dist: Path, tmp_path: Path) -> None:
    def many(metadata: Any) -> None:
        metadata.state_dict_metadata[FINAL[0]].size = (1,) * 5000

    with pytest.raises(ArtifactError, match="wanted a shape"):
        read_index(str(indexed(copied(dist, tmp_path), many)))


def test_a_file_truncated_after_its_last_tensor_is_refused(dist: Path, tmp_path: Path) -> None:
    root = copied(dist, tmp_path)
    path = root / "iter_0000100/__0_0.distcp"
    data, name = path.read_bytes(), "decoder.layers.mlp.linear_fc1._extra_state/shard_0_1"

    def append(metadata: Any) -> None:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        place = _StorageInfo(path.name, offset=len(data), length=10)
        metadata.storage_data[MetadataIndex(name)] = place

    indexed(root, append)
    path.write_bytes(data + bytes(10))
    with open_source(str(root), "torch_dist"):
        pass
    path.write_bytes(data + bytes(9))
    with pytest.raises(ArtifactError, match=r"__0_0\.distcp: has \d+ bytes.* it is truncated"):
        open_source(str(root), "torch_dist")


# --- loaders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", sorted(LOADERS.keys() - {"trainyard"}))
def test_a_wrong_loader_names_the_format_found(
    ranks: Path, dist: Path, tmp_path: Path, loader: str
) -> None:
    hf = tmp_path / "hf"
    hf.mkdir()
    for name in ("config.json", "model.safetensors"):
        (hf / name).touch()
    fits = {"core": ranks, "legacy": ranks, "torch_dist": dist, "hf": hf, "llama_mistral": hf}
    fits["mixtral_hf"] = hf
    messages = {ranks: "torch format; give --loader core", dist: "torch_dist", hf: "Hugging Face"}
    for place, message in messages.items():
        if place != fits[loader]:
            with pytest.raises(
                ConfigError, match=f"--loader {loader} reads .* but this is .*{message}"
            ):
                open_source(str(place), loader)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"but the folder has only .*notes\.txt"):
        open_source(str(tmp_path), "hf")
