"""Reading `torch_dist` checkpoints; hostile ones are refused and nothing in them is run."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.trainyard.checkpoint.samples import PADDED_VOCAB, random_gpt
from tests.trainyard.conversion.megatron import test_read as ranks
from tests.trainyard.conversion.megatron.megatron_files import Layout as RankLayout
from tests.trainyard.conversion.megatron.megatron_files import arguments
from tests.trainyard.conversion.megatron.test_read import states_of
from tests.trainyard.conversion.torch_dist.torch_dist_files import (
    Layout,
    megatron_metadata,
    quietly_save,
    stored_of,
    write,
    write_around,
)
from tests.trainyard.conversion.torch_save.test_pickles import Payload
from trainyard.artifacts import store
from trainyard.checkpoint.safetensors.file import spec_of
from trainyard.conversion.megatron.progress import tokens_of
from trainyard.conversion.torch_dist.index import fills, read_index
from trainyard.conversion.torch_dist.read import TorchDistSource, open_torch_dist
from trainyard.errors import ArtifactError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.moe_config import MoEConfig

pytestmark = pytest.mark.slow

GPT, LLAMA, QWEN = (
    replace(config, num_layers=2) for config in (ranks.GPT, ranks.LLAMA, ranks.QWEN)
)


def weights_of(config: GPTConfig) -> dict[str, Tensor]:
    return {name: t.bfloat16() for name, t in ranks.weights_of(random_gpt(config)).items()}


def read_all(root: Path | str) -> tuple[dict[str, Tensor], TorchDistSource]:
    with open_torch_dist(str(root)) as source:
        found = {name: source.read(name) for name in source.specs}
    assert all(spec_of(tensor) == source.specs[name] for name, tensor in found.items())
    assert all(tensor.is_contiguous() for tensor in found.values())
    return found, source


def check(root: Path, whole: dict[str, Tensor], states: dict[str, dict[str, Tensor]]) -> None:
    found, _ = read_all(root)
    wanted = {f"model.{name}": tensor for name, tensor in whole.items()}
    for kind, tensors in states.items():
        wanted |= {f"optimizer.{kind}.{name}": tensor for name, tensor in tensors.items()}
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_whole_tensors_that_torch_saved_are_read(tmp_path: Path, config: GPTConfig) -> None:
    """A plain state dict through torch's own planner, index class and files."""
    whole = weights_of(config)
    folder = write_around(tmp_path, config, Layout(), PADDED_VOCAB)
    stored = stored_of(whole, config, Layout())
    stacked = {key: tensor.whole() for key, tensor in stored.items()}
    assert stacked["decoder.layers.mlp.linear_fc2.weight"].shape[0] == config.num_layers
    quietly_save(folder, **stacked)
    check(tmp_path, whole, {})


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        pytest.param(GPT, Layout(tp=2), id="plain", marks=pytest.mark.slow),
        pytest.param(LLAMA, Layout(tp=2, main="param"), id="reshardable", marks=pytest.mark.slow),
        pytest.param(QWEN, Layout(tp=2, flat=2, prefix="chained_0."), id="flat"),
        pytest.param(
            LLAMA,
            Layout(stacked=False, own_class=False),
            id="single layers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_any_layout_reads_back_as_the_same_model(
    tmp_path: Path, config: GPTConfig, layout: Layout
) -> None:
    whole = weights_of(config)
    states = states_of(whole)
    common = {"optimizer": {"optimizer": {"state": {"common_step": 98}, "param_groups": []}}}
    root = write(tmp_path / "m", whole, config, replace(layout, common=common), states)
    check(root, whole, states)
    with open_torch_dist(str(root / "iter_0000100")) as source:  # without the tracker file
        assert (source.step, source.num_updates) == (100, 98)
        assert source.consumed_train_samples == 6400
        assert (source.config.query_groups, source.config.swiglu) == (
            config.query_groups,
            config.swiglu,
        )


@pytest.mark.slow
def test_a_checkpoint_in_a_store_reads_like_a_folder(tmp_path: Path) -> None:
    whole = weights_of(GPT)
    write(tmp_path / "m", whole, GPT, Layout(tp=2))
    for path in (p for p in (tmp_path / "m").rglob("*") if p.is_file()):
        url = f"memory://torch_dist/{path.relative_to(tmp_path / 'm')}"
        store.write_bytes(url, path.read_bytes())
    found, _ = read_all("memory://torch_dist")
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("args", "tokens"),
    [
        ({}, PADDED_VOCAB),
        ({"true_vocab_size": 257, "vocab_size": 300}, 257),
        ({"vocab_size": 300, "tokenizer_type": "TikTokenizer"}, 300),
        ({"vocab_size": 300, "tokenizer_type": "NullTokenizer"}, 301),
        ({"vocab_size": 100_000}, PADDED_VOCAB),
    ],
)
def test_the_number_of_tokens_comes_from_the_args(args: dict[str, Any], tokens: int) -> None:
    values = vars(arguments(GPT, RankLayout(args=args), PADDED_VOCAB))
    assert tokens_of(values, PADDED_VOCAB) == tokens


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "m"
    return write(root, weights_of(GPT), GPT, Layout(own_class=False))


# --- what is left out, and why ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dp_reshardable", None])
def test_states_in_buffers_are_left_out_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str | None
) -> None:
    whole = weights_of(GPT)
    content = {"content_metadata": {"distrib_optim_sharding_type": kind}} if kind else {}
    folder = write_around(tmp_path, GPT, Layout(common=content), PADDED_VOCAB)
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
    stored = stored_of(whole, GPT, Layout(stacked=False))
    tensors = {key: tensor.pieces[0][1] for key, tensor in stored.items()}
    quietly_save(folder, **tensors, **{f"{bucket}.bucket_idx_0.exp_avg": torch.ones(64)})
    check(tmp_path, whole, {})
    (line,) = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert (kind or "gbuf_idx_0") in line
    assert "--dist-ckpt-optim-fully-reshardable" in line


@pytest.mark.slow
def test_an_incomplete_optimizer_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = weights_of(GPT)
    states = states_of(whole)
    del states["exp_avg_sq"]["decoder.final_layernorm.bias"]
    check(write(tmp_path / "m", whole, GPT, Layout(), states), whole, {})
    assert "it has no exp_avg_sq of decoder.final_layernorm.bias" in caplog.text


def garble(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(b"{")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda folder: (folder / "metadata.json").unlink(),
            "has no metadata.json, which is written last",
        ),
        (
            lambda folder: (folder / ".metadata").unlink(),
            r"has no \.metadata; the checkpoint is incomplete",
        ),
        (
            lambda folder: (folder / "common.pt").unlink(),
            r"neither common\.pt nor, in \.metadata, common_state.* incomplete",
        ),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp"),
        (
            lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
            "says sharded_backend 'zarr', wanted 'torch_dist'",
        ),
        (garble("metadata.json"), r"metadata\.json: not a JSON document"),
        (garble(".metadata"), "pickle is refused: it is damaged"),
        (garble("common.pt"), "not a file of torch.save"),
        (
            lambda folder: os.truncate(p := folder / "__0_0.distcp", p.stat().st_size - 5000),
            r"__0_0\.distcp: has .* its items end at .* it is truncated",
        ),
    ],
)
def test_an_incomplete_folder_is_refused(
    sound: Path, tmp_path: Path, spoil: Callable[[Path], None], words: str
) -> None:
    root = tmp_path / "m"
    shutil.copytree(sound, root)
    spoil(root / "iter_0000100")
    with pytest.raises(ArtifactError, match=words):
        open_torch_dist(str(root))


def test_what_is_not_the_model_of_its_args_is_refused(tmp_path: Path) -> None:
    whole = weights_of(LLAMA)
    short = {name: t for name, t in whole.items() if ".linear_proj." not in name}
    with pytest.raises(ArtifactError, match=r"2 missing:\n    decoder.layers.0.self_attention.li"):
        open_torch_dist(str(write(tmp_path / "a", short, LLAMA, Layout())))
    more = {**whole, "decoder.layers.0.mlp.router.weight": torch.ones(4, 32)}
    with pytest.raises(ArtifactError, match=r"1 unexpected:\n    decoder.layers.0.mlp.router"):
        open_torch_dist(str(write(tmp_path / "b", more, LLAMA, Layout(stacked=False))))
    with pytest.raises(ArtifactError, match="has no args"):
        open_torch_dist(str(write(tmp_path / "c", whole, LLAMA, Layout(args=None))))
    with pytest.raises(ArtifactError, match=r"missing:\n    decoder.layers.0.mlp.experts"):
        open_torch_dist(str(write(tmp_path / "d", whole, LLAMA, Layout(args={"num_experts": 8}))))


def test_experts_are_read_from_their_own_axis(tmp_path: Path) -> None:
    moe = MoEConfig(num_experts=4, moe_ffn_hidden_size=24)
    config = replace(LLAMA, moe=moe)
    whole = weights_of(config)
    theirs = {name.replace(".experts.", ".experts.experts."): t for name, t in whole.items()}
    args = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
    root = write(tmp_path, theirs, config, Layout(args=args))
    with open_torch_dist(str(root)) as source:
        assert source.config.experts == moe
        assert source.specs.keys() == {f"model.{name}" for name in whole}
        for name, tensor in whole.items():
            assert torch.equal(source.read(f"model.{name}"), tensor), name


# --- hostile --------------------------------------------------------------------------------------


def spoiled(sound: Path, tmp_path: Path, change: Callable[[Any, Path], Any]) -> Path:
    """A copy with an index that `change` made of the sound one."""
    root = tmp_path / "m"
    shutil.copytree(sound, root)
    path = root / "iter_0000100/.metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata, root / "iter_0000100") or metadata))
    return root


@pytest.mark.parametrize("where", [".metadata", "common.pt", "__0_0.distcp"])
def test_a_payload_is_refused_and_not_run(sound: Path, tmp_path: Path, where: str) -> None:
    witness = tmp_path / "ran"
    payload = Payload(os.system, f"touch {witness}")

    def plant(metadata: Any, folder: Path) -> Any:
        if where == ".metadata":
            metadata.planner_data = payload
            return metadata
        if where == "common.pt":
            torch.save({"args": payload}, folder / where)
            return None
        place = metadata.storage_data[MetadataIndex("decoder.final_layernorm.bias", (0,))]
        torch.save(payload, folder / "__9_0.distcp")
        place.relative_path, place.offset = "__9_0.distcp", 0
        place.length = (folder / "__9_0.distcp").stat().st_size
        return metadata

    root = spoiled(sound, tmp_path, plant)
    with pytest.raises(ArtifactError, match=r"refused: it asks for posix\.system"):
        open_torch_dist(str(root))
    assert not witness.exists()
    evil = {"__0_0.distcp": "__9_0.distcp"}.get(where, where)
    if where == ".metadata":
        pickle.loads((root / "iter_0000100" / evil).read_bytes())  # the payload is a real one
    else:
        torch.load(root / "iter_0000100" / evil, weights_only=False)
    assert witness.exists()


BIAS = "decoder.layers.mlp.linear_fc2.bias"


def place_of(metadata: Any) -> Any:
    return metadata.storage_data[MetadataIndex(BIAS, (1, 0))]


OTHER = MetadataIndex("decoder.final_layernorm.bias", (0,))


def set_place(name: str, value: Any) -> Callable[[Any, Path], None]:
    return lambda metadata, folder: setattr(place_of(metadata), name, value)


def tell_another_type(metadata: Any, folder: Path) -> None:
    """Shows only when the files are opened."""
    metadata.state_dict_metadata[BIAS].properties.dtype = torch.float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            set_place("relative_path", "../../secret.distcp"),
            "'../../secret.distcp' is not the name of a file in its folder",
        ),
        (set_place("relative_path", "/etc/passwd"), "'/etc/passwd' is not the name of a file"),
        (set_place("offset", -8), "bytes from -8 on"),
        (set_place("length", 2**40), "share the bytes of __0_0.distcp"),
        (
            lambda m, _: setattr(
                m.state_dict_metadata[BIAS].chunks[1], "offsets", torch.Size((0, 0))
            ),
            r"pieces of decoder.layers.mlp.linear_fc2.bias do not fill its shape \[2, 32\]",
        ),
        (
            lambda m, _: m.state_dict_metadata[BIAS].chunks.__delitem__(-1),
            r"do not fill its shape \[2, 32\]",
        ),
        (
            lambda m, _: setattr(m.state_dict_metadata[BIAS], "size", torch.Size((2**40, 2**20))),
            "do not fill its",
        ),
        (
            lambda m, _: vars(place_of(m)).update(vars(m.storage_data[OTHER])),
            "share the bytes of __0_0.distcp",
        ),
        (tell_another_type, r"wanted a tensor float32 \[1, 32\] by the index"),
        (set_place("transform_descriptors", ["zstd"]), "is compressed or encrypted"),
        (lambda *_: {"state_dict_metadata": {}}, "found a dict, wanted Metadata"),
    ],
)
def test_an_index_that_contradicts_its_files_is_refused(
    sound: Path, tmp_path: Path, change: Callable[[Any, Path], Any], words: str
) -> None:
    root = spoiled(sound, tmp_path, change)
    index = root / "iter_0000100/.metadata"
    with pytest.raises(ArtifactError, match=words):
        open_torch_dist(str(root)) if change is tell_another_type else read_index(str(index))


def test_boxes_fill_without_gap_or_overlap() -> None:
    whole: Any = [((0, 0), (2, 3)), ((0, 3), (2, 1)), ((2, 0), (1, 4))]
    assert fills(whole, (0, 0), (3, 4))
    columns: Any = [((0, 0), (1, 2)), ((1, 0), (2, 2)), ((0, 2), (3, 2))]
    assert fills(columns, (0, 0), (3, 4))
    for spoilt in (
        whole[:-1],
        [*whole, ((0, 0), (1, 1))],
        [((0, 0), (2, 3)), ((0, 2), (2, 2)), ((2, 0), (1, 4))],
        [((0, 0), (3, 4, 1))],
        [],
    ):
        assert not fills(spoilt, (0, 0), (3, 4))
    assert fills([((), ())], (), ())
    assert fills([], (0,), (0,))


def test_the_class_of_the_index_exists_only_while_it_is_written() -> None:
    """Or the reader might import it after all."""
    with megatron_metadata():
        pass
    with pytest.raises(ModuleNotFoundError):
        __import__("megatron.core")
