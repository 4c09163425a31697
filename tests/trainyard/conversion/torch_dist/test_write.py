"""Writing `torch_dist` checkpoints that torch and our reader read back."""

from __future__ import annotations

import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from tests.trainyard.checkpoint.samples import PADDED_VOCAB
from tests.trainyard.conversion.megatron import converted_runs
from tests.trainyard.conversion.megatron.converted_runs import RUN, save_trained
from tests.trainyard.conversion.megatron.test_read import states_of
from tests.trainyard.conversion.torch_dist.test_read import (
    GPT,
    LLAMA,
    QWEN,
    read_all,
    weights_of,
)
from tests.trainyard.conversion.torch_dist.torch_dist_files import Layout, stored_of, write
from trainyard.artifacts import store
from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.torch_dist.read import open_torch_dist
from trainyard.conversion.torch_dist.write import write_torch_dist
from trainyard.conversion.vocabulary import has_rows
from trainyard.errors import ArtifactError, Stopped
from trainyard.models.gpt.config import GPTConfig

pytestmark = pytest.mark.slow

TOKENS = 257
"""Of `save_trained`; the rows beyond are padding."""

ALL_FILES = (".metadata", "__0_0.distcp", "common.pt", "metadata.json")


def convert(source: Any, folder: Path, **options: Any) -> Path:
    write_torch_dist(source, lambda name: store.open_output(str(folder / name), name), **options)
    return folder


def made_of(
    tmp_path: Path, config: GPTConfig, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Path, dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Written from a step of a run: the folder, its weights, its states."""
    whole = weights_of(config)
    states = states_of(whole)
    distributed = options.pop("run_is_distributed", False)
    run = {**RUN, "use_distributed_optimizer": distributed}
    monkeypatch.setattr(converted_runs, "RUN", run)
    save_trained(tmp_path / "run", whole, states, config)
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        return convert(checkpoint, tmp_path / "made", **options), whole, states


def load_with_torch(folder: Path) -> dict[str, Tensor]:
    """Every tensor, by torch's own reader into plain tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in index.items()
            if hasattr(entry, "size")
        }
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def same_tokens(name: str, left: Tensor, right: Tensor) -> bool:
    """Bit for bit; but rows of padding, whose values mean nothing."""
    if has_rows(f".{name}"):
        return torch.equal(left[:TOKENS], right[:TOKENS]) and left.shape == right.shape
    return torch.equal(left, right)


@pytest.mark.parametrize(
    ("config", "distributed"),
    [
        pytest.param(GPT, False, id="gpt"),
        pytest.param(QWEN, True, id="qwen"),
        pytest.param(GPT, True, id="gpt distributed", marks=pytest.mark.slow),
        pytest.param(QWEN, False, id="qwen plain", marks=pytest.mark.slow),
    ],
)
def test_torch_reads_the_keys_of_the_format(
    tmp_path: Path, config: GPTConfig, distributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Key for key and bit for bit what is made by hand for the files by hand."""
    made, whole, states = made_of(tmp_path, config, monkeypatch, run_is_distributed=distributed)
    wanted = stored_of(whole, config, Layout())
    for kind, tensors in states.items():
        theirs = "fp32_param" if kind == "param" and not distributed else kind
        wanted |= stored_of(tensors, config, Layout(), f"optimizer.state.{theirs}.")
    found = load_with_torch(made / "iter_0000100")
    assert found.keys() == wanted.keys()
    for key, stored in wanted.items():
        assert same_tokens(key, found[key], stored.whole()), key
    assert (made / "latest_checkpointed_iteration.txt").read_text() == "100"
    backend = json.loads((made / "iter_0000100/metadata.json").read_text())
    assert backend["sharded_backend"] == "torch_dist"


def test_common_state_has_what_megatron_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, *_ = made_of(tmp_path, LLAMA, monkeypatch)
    common = torch.load(made / "iter_0000100/common.pt", weights_only=False)
    assert (common["iteration"], common["checkpoint_version"]) == (100, 3.0)
    assert common["content_metadata"] == {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    args = common["args"]
    assert (args.padded_vocab_size, args.swiglu, args.num_query_groups) == (PADDED_VOCAB, True, 2)
    assert (args.ckpt_format, args.consumed_train_samples) == ("torch_dist", 400)
    optimizer = common["optimizer"]["optimizer"]
    assert optimizer["state"] == {"common_step": 98}
    assert {group["wd_mult"] for group in optimizer["param_groups"]} == {0.0, 1.0}
    assert all("params" not in group for group in optimizer["param_groups"])
    assert common["opt_param_scheduler"]["num_steps"] == 392
    # Megatron core asks for a pickled object of each module of each layer.
    index = dcp.FileSystemReader(made / "iter_0000100").read_metadata()
    states = {key for key in index.state_dict_metadata if "_extra_state" in key}
    assert "decoder.layers.mlp.linear_fc1._extra_state/shard_1_2" in states
    assert len(states) == 4 * 2 + 1


@pytest.mark.slow
def test_the_distributed_optimizer_has_its_own_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, *_ = made_of(tmp_path, LLAMA, monkeypatch, distributed_optimizer=True)
    common = torch.load(made / "iter_0000100/common.pt", weights_only=False)
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    assert {group["step"] for group in common["optimizer"]["optimizer"]["param_groups"]} == {98}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GPT, id="gpt", marks=pytest.mark.slow),
        pytest.param(LLAMA, id="llama"),
        pytest.param(QWEN, id="qwen", marks=pytest.mark.slow),
    ],
)
def test_a_written_checkpoint_reads_back_with_its_optimizer(
    tmp_path: Path, config: GPTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    advanced: list[int] = []
    expected: list[int] = []
    made, whole, states = made_of(
        tmp_path, config, monkeypatch, advance=advanced.append, expect=expected.append, num_files=3
    )
    assert [sum(advanced)] == expected
    assert len(list(made.rglob("__0_?.distcp"))) == 3
    found, source = read_all(made)
    for name, tensor in whole.items():
        assert same_tokens(name, found[f"model.{name}"], tensor), name
    for kind, tensors in states.items():
        for name, tensor in tensors.items():
            assert same_tokens(name, found[f"optimizer.{kind}.{name}"], tensor), (kind, name)
    assert (source.num_updates, source.consumed_train_samples) == (98, 400)
    assert (source.vocab_size, source.padded_vocab_size) == (TOKENS, PADDED_VOCAB)
    assert source.config.head_dim == config.head_dim


@pytest.mark.slow
def test_fp32_weights_are_copied_only_if_the_format_requires_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {name: tensor.float() for name, tensor in weights_of(GPT).items()}
    states = {kind: t for kind, t in states_of(whole).items() if kind != "param"}
    save_trained(tmp_path / "run", whole, states, GPT)
    for distributed in (False, True):
        folder = tmp_path / f"made-{distributed}"
        with open_checkpoint(str(tmp_path / "run")) as checkpoint:
            convert(checkpoint, folder, distributed_optimizer=distributed)
        keys = load_with_torch(folder / "iter_0000100")
        copies = [key for key in keys if "fp32_param" in key or "state.param." in key]
        assert len(copies) == (len([k for k in keys if "optim" not in k]) if distributed else 0)
        found, source = read_all(folder)
        assert source.num_updates == 98
        assert {name.split(".")[1] for name in found if name.startswith("optimizer.")} == set(
            states
        )


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    root = write(tmp_path / "m", weights_of(LLAMA), LLAMA, Layout())
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    with open_torch_dist(str(root)) as source:
        read = source.read

        def counted(name: str) -> Tensor:
            nonlocal most
            most = max(most, sum(ref() is not None for ref in alive))
            tensor = read(name)
            alive.append(weakref.ref(tensor))
            return tensor

        source.read = counted  # type: ignore[method-assign]
        convert(source, tmp_path / "made", num_files=2)
    assert len(alive) == len(source.specs)
    assert most <= 1


@pytest.mark.parametrize("error", [Stopped(15), ArtifactError("torn"), KeyboardInterrupt()])
def test_an_error_inside_torch_is_raised_unchanged(tmp_path: Path, error: BaseException) -> None:
    root = write(tmp_path / "m", weights_of(GPT), GPT, Layout())
    with open_torch_dist(str(root)) as source:

        def fail(name: str) -> Tensor:
            raise error

        source.read = fail  # type: ignore[method-assign]
        with pytest.raises(type(error)) as caught:
            convert(source, tmp_path / "made")
    assert caught.value is error
    assert not (tmp_path / "made/latest_checkpointed_iteration.txt").exists()


def test_a_release_has_no_step_and_no_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, whole, _ = made_of(tmp_path, GPT, monkeypatch, save_optimizer=False)
    with open_torch_dist(str(made)) as source:
        assert len(source.specs) == len(whole)
        source.step = 0
        released = convert(source, tmp_path / "released")
    assert (released / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert sorted(path.name for path in (released / "release").iterdir()) == sorted(ALL_FILES)
    with open_torch_dist(str(released)) as source:
        assert (source.step, source.num_updates) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "rows"), [(257, 512), (100, 256)])
def test_the_vocabulary_is_padded_for_ranks(
    tmp_path: Path, tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, whole, _ = made_of(tmp_path, LLAMA, monkeypatch, tp=2, true_vocab_size=tokens)
    found, source = read_all(made)
    assert (source.padded_vocab_size, source.vocab_size) == (rows, tokens)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert found[f"model.{name}"].shape[0] == rows
        assert torch.equal(found[f"model.{name}"][:tokens], whole[name][:tokens])
        assert not found[f"optimizer.exp_avg.{name}"][PADDED_VOCAB:].any()


@pytest.mark.slow
def test_the_same_checkpoint_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, *_ = made_of(tmp_path, GPT, monkeypatch)
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        again = convert(checkpoint, tmp_path / "again")
    names = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    assert [name.name for name in names] == [*ALL_FILES, "latest_checkpointed_iteration.txt"]
    assert all((made / name).read_bytes() == (again / name).read_bytes() for name in names)


@pytest.mark.slow
def test_the_files_that_mark_completion_are_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, *_ = made_of(tmp_path, GPT, monkeypatch)
    order: list[str] = []

    def noted(name: str) -> Any:
        order.append(name)
        return store.open_output(str(tmp_path / "again" / name), name)

    with open_torch_dist(str(made)) as source:
        write_torch_dist(source, noted)
    parts = ["__0_0.distcp", ".metadata", "common.pt", "metadata.json"]
    assert order == [f"iter_0000100/{part}" for part in parts] + [
        "latest_checkpointed_iteration.txt"
    ]
