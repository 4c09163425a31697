"""Reading Megatron-LM checkpoints of every class, version and split."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.checkpoint.samples import PADDED_VOCAB, random_gpt
from tests.trainyard.conversion.megatron.megatron_files import (
    Layout,
    arguments,
    megatron_modules,
    write,
)
from trainyard.checkpoint.safetensors.file import spec_of
from trainyard.conversion.megatron.args import config_of
from trainyard.conversion.megatron.read import open_megatron
from trainyard.errors import ArtifactError, ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
}
GPT = GPTConfig(**SIZES)
LLAMA_OPTIONS: dict[str, Any] = {
    **SIZES,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 12,
    "ffn_hidden_size": 48,
    "rotary_base": 50000.0,
}
LLAMA = GPTConfig(**LLAMA_OPTIONS)
QWEN = GPTConfig(**LLAMA_OPTIONS, qk_layernorm=True, add_qkv_bias=True)


def weights_of(model: GPTModel) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def states_of(whole: dict[str, Tensor], seed: int = 7) -> dict[str, dict[str, Tensor]]:
    """Moments, and fp32 values of which the weights may be roundings."""
    generator = torch.Generator().manual_seed(seed)
    return {
        kind: {name: torch.randn(t.shape, generator=generator) for name, t in whole.items()}
        for kind in ("exp_avg", "exp_avg_sq", "param")
    }


def assert_states(found: dict[str, Tensor], states: dict[str, dict[str, Tensor]]) -> None:
    for kind, tensors in states.items():
        for name, tensor in tensors.items():
            assert torch.equal(found[f"optimizer.{kind}.{name}"], tensor), (kind, name)


def read_all(root: Path, **given: Any) -> tuple[dict[str, Tensor], GPTConfig]:
    with open_megatron(str(root), **given) as source:
        found = {name: source.read(name) for name in source.specs}
        for name, tensor in found.items():
            assert spec_of(tensor) == source.specs[name]
            assert tensor.is_contiguous()
        return found, source.config


def logits(config: GPTConfig, weights: dict[str, Tensor]) -> Tensor:
    model = GPTModel(config, PADDED_VOCAB)
    model.load_state_dict({n.removeprefix("model."): t for n, t in weights.items()})
    tokens = torch.randint(0, PADDED_VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(tokens)


def check(root: Path, config: GPTConfig, layout: Layout, **given: Any) -> None:
    """What is read is bit for bit what the files were cut from, and computes the same."""
    model = random_gpt(config)
    whole = weights_of(model)
    found, found_config = read_all(write(root, whole, config, layout), **given)
    assert found.keys() == {f"model.{name}" for name in whole}
    for name, tensor in whole.items():
        assert torch.equal(found[f"model.{name}"], tensor), name
    assert torch.equal(logits(found_config, found), logits(config, weights_of(model)))


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (GPT, Layout(tp=2, pp=2)),
        (LLAMA, Layout(spelling="engine", tp=2, pp=2)),
        (QWEN, Layout(tp=2)),
        (GPT, Layout(spelling="legacy", tp=2, pp=2)),
        (GPT, Layout(spelling="legacy", version=2.0, tp=2)),
        (GPT, Layout(spelling="oldest", version=1.0, tp=2)),
        (GPT, Layout(spelling="oldest", version=0.0, tp=2, new_zip=False)),
        (GPT, Layout(spelling="oldest", version=None, release=True)),
    ],
    ids=lambda value: (
        f"{value.spelling} v{value.version} tp{value.tp} pp{value.pp} vpp{value.vpp}"
        if isinstance(value, Layout)
        else ""
    ),
)
def test_any_split_is_the_model_it_was_cut_from(
    tmp_path: Path, config: GPTConfig, layout: Layout
) -> None:
    check(tmp_path / "m", config, layout)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("spelling", ["core", "engine", "legacy", "legacy-engine"])
@pytest.mark.parametrize("heads", [GPT, LLAMA], ids=["gpt", "llama"])
def test_every_split(tmp_path: Path, heads: GPTConfig, spelling: str, pp: int, tp: int) -> None:
    if heads.query_groups % tp:
        tp = 1
    vpp = 2 if pp == 2 else 1
    check(tmp_path / "m", heads, Layout(spelling=spelling, tp=tp, pp=pp, vpp=vpp))


def test_a_file_of_2019_needs_the_number_of_heads_alone(tmp_path: Path) -> None:
    """As NVIDIA's GPT-345M: no args, no version, a release, torch's old layout, 16-bit weights."""
    layout = Layout(spelling="oldest", version=None, release=True, args=None, new_zip=False)
    model = random_gpt(GPT)
    whole = {name: tensor.half() for name, tensor in weights_of(model).items()}
    root = write(tmp_path / "m", whole, GPT, layout)
    with pytest.raises(ConfigError, match="give --num-attention-heads"):
        open_megatron(str(root))
    found, config = read_all(root, num_attention_heads=4)
    assert (config.num_layers, config.positions, config.activation) == (4, 16, "gelu_tanh")
    assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in whole.items())


def test_the_state_of_the_run_is_read(tmp_path: Path) -> None:
    whole = weights_of(random_gpt(GPT))
    layout = Layout(tp=2, args={"vocab_size": 257})
    root = write(tmp_path / "m", whole, GPT, layout)
    with open_megatron(str(root)) as source:
        assert (source.step, source.consumed_train_samples, source.num_updates) == (100, 6400, 0)
        assert (source.vocab_size, source.padded_vocab_size) == (257, PADDED_VOCAB)
        assert source.tokenizer_files() == {}
        assert source.config.hidden_dropout == GPT.hidden_dropout
    with open_megatron(str(root / "iter_0000100")) as source:
        assert source.step == 100
    release = write(tmp_path / "r", whole, GPT, Layout(release=True))
    with open_megatron(str(release)) as source:
        assert (source.step, source.vocab_size) == (0, PADDED_VOCAB)


# --- the optimizer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, optimizer="plain"),
        Layout(spelling="oldest", version=0.0, tp=2, optimizer="plain"),
        pytest.param(
            Layout(spelling="engine", pp=2, vpp=2, optimizer="plain"), marks=pytest.mark.slow
        ),
        pytest.param(Layout(spelling="legacy", tp=2, optimizer="plain"), marks=pytest.mark.slow),
    ],
    ids=["core", "oldest", "engine", "legacy"],
)
def test_states_of_the_plain_optimizer_are_kept(tmp_path: Path, layout: Layout) -> None:
    whole = {name: t.bfloat16() for name, t in weights_of(random_gpt(GPT)).items()}
    states = states_of(whole)
    root = write(tmp_path / "m", whole, GPT, layout, states)
    found, _ = read_all(root)
    assert_states(found, states)
    with open_megatron(str(root)) as source:
        assert source.num_updates == 98


def test_in_fp32_there_are_no_main_parameters(tmp_path: Path) -> None:
    whole = weights_of(random_gpt(GPT))
    states = states_of(whole)
    del states["param"]
    root = write(tmp_path / "m", whole, GPT, Layout(optimizer="plain"), states)
    found, _ = read_all(root)
    assert {name.split(".")[1] for name in found if name.startswith("optimizer.")} == {
        "exp_avg",
        "exp_avg_sq",
    }
    with open_megatron(str(root)) as source:
        assert source.num_updates == 98


WIDE = GPTConfig(num_layers=2, hidden_size=128, num_attention_heads=4, seq_length=16)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(spelling="legacy", pp=2)])
def test_states_of_the_distributed_optimizer_are_kept(tmp_path: Path, layout: Layout) -> None:
    whole = {name: t.bfloat16() for name, t in weights_of(random_gpt(WIDE)).items()}
    states = states_of(whole)
    layout = replace(layout, optimizer="distributed")
    found, _ = read_all(write(tmp_path / "m", whole, WIDE, layout, states))
    assert_states(found, states)


def test_buckets_of_before_2024_are_read_as_they_are(tmp_path: Path) -> None:
    """A list of vectors, one per bucket of gradients, in the place of one, under float32."""
    whole = {name: t.bfloat16() for name, t in weights_of(random_gpt(WIDE)).items()}
    states = states_of(whole)
    layout = Layout(optimizer="distributed")
    root = write(tmp_path / "m", whole, WIDE, layout, states)
    path = root / "iter_0000100/mp_rank_00/distrib_optim.pt"
    (vectors,) = torch.load(path, weights_only=False)[0].values()
    ends = [tensor.numel() for tensor in reversed(whole.values())]
    buckets = [sum(ends[:5]), sum(ends[5:])]
    split = {kind: list(vectors[kind].split(buckets)) for kind in states}
    torch.save({0: {torch.float32: split}}, path)
    found, _ = read_all(root)
    assert_states(found, states)


def change(root: Path, edit: Any, name: str = "mp_rank_00/model_optim_rng.pt") -> None:
    path = root / "iter_0000100" / name
    tree = torch.load(path, weights_only=False)
    edit(tree)
    torch.save(tree, path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tree: tree["optimizer"]["optimizer"]["state"].pop(0), "no state of"),
        (lambda tree: tree["optimizer"]["optimizer"]["param_groups"].pop(), "it has no group for"),
        (
            lambda tree: tree["optimizer"]["optimizer"]["state"].update(
                {0: tree["optimizer"]["optimizer"]["state"][1]}
            ),
            "its exp_avg of",
        ),
        (lambda tree: tree.update(optimizer=[1, 2]), "not the table of one optimizer"),
    ],
)
def test_an_unidentifiable_optimizer_is_left_out_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, edit: Any, words: str
) -> None:
    whole = {name: t.bfloat16() for name, t in weights_of(random_gpt(GPT)).items()}
    layout = Layout(optimizer="plain", args={})
    root = write(tmp_path / "m", whole, GPT, layout, states_of(whole))
    without_enum(root)
    change(root, edit)
    with caplog.at_level(logging.WARNING):
        found, _ = read_all(root)
    assert all(name.startswith("model.") for name in found)
    (line,) = [r.getMessage() for r in caplog.records if "optimizer" in r.getMessage()]
    assert words in line


def without_enum(root: Path) -> None:
    """Leave out of args what torch.load could not import, so that the file can be changed here."""
    for path in root.rglob("model_optim_rng.pt"):
        with megatron_modules():
            tree = torch.load(path, weights_only=False)
        del tree["args"].attention_backend
        torch.save(tree, path)


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            {"num_experts": 8, "moe_router_load_balancing_type": "sinkhorn"},
            "--moe-router-load-balancing-type sinkhorn",
        ),
        ({"num_experts": 8, "expert_tensor_parallel_size": 4}, "cut over 4 ranks"),
        ({"moe_latent_size": 8}, r"moe_latent_size \(8\)"),
        ({"mtp_use_repeated_layer": True}, "mtp_use_repeated_layer"),
        ({"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        ({"position_embedding_type": "relative"}, "--position-embedding-type relative"),
        ({"spec": ["a", "b"]}, "spec"),
    ],
)
def test_a_model_that_ours_does_not_compute_is_refused(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(vars(arguments(GPT, Layout(args=args), PADDED_VOCAB)), "x.pt")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"num_layers": 5}, "stages have 4 layers, but its args say 5"),
        ({"hidden_size": 64}, r"wanted \[\d+, 64\]"),
        ({"tensor_model_parallel_size": 2}, "files of 1 tensor ranks, but its args say 2"),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
        ({"normalization": "RMSNorm"}, r"9 unexpected:\n    decoder\.final_layernorm\.bias"),
        (
            {"swiglu": True, "ffn_hidden_size": 128},
            r"linear_fc1\.weight is \[128, 32\], wanted \[256, 32\]",
        ),
    ],
)
def test_args_that_do_not_fit_the_tensors_are_refused(
    tmp_path: Path, args: dict[str, Any], words: str
) -> None:
    root = write(tmp_path / "m", weights_of(random_gpt(GPT)), GPT, Layout(args=args))
    with pytest.raises(ArtifactError, match=words):
        open_megatron(str(root))


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    whole = weights_of(random_gpt(GPT))
    root = write(tmp_path / "m", whole, GPT, Layout(tp=2, pp=2))
    shutil.rmtree(root / "iter_0000100" / "mp_rank_01_000")
    with pytest.raises(ArtifactError, match=r"2 tensor x 2 pipeline ranks; missing mp_rank_01_000"):
        open_megatron(str(root))
    (root / "latest_checkpointed_iteration.txt").write_text("seven")
    with pytest.raises(ArtifactError, match="'seven', wanted a number or `release`"):
        open_megatron(str(root))
    (root / "latest_checkpointed_iteration.txt").write_text("200")
    with pytest.raises(
        ArtifactError, match=r"iter_0000200: has no mp_rank_XX.*the folder is empty"
    ):
        open_megatron(str(root))


def test_ranks_of_two_checkpoints_are_refused(tmp_path: Path) -> None:
    whole = weights_of(random_gpt(GPT))
    root = write(tmp_path / "m", whole, GPT, Layout(tp=2))
    other = write(tmp_path / "o", whole, GPT, Layout(tp=2, step=200))
    name = "mp_rank_01/model_optim_rng.pt"
    shutil.copy(other / "iter_0000200" / name, root / "iter_0000100" / name)
    with pytest.raises(ArtifactError, match="is from another checkpoint"):
        open_megatron(str(root))


def test_a_tied_embedding_whose_copy_differs_is_refused(tmp_path: Path) -> None:
    whole = weights_of(random_gpt(GPT))
    root = write(tmp_path / "m", whole, GPT, Layout(pp=2))
    without_enum(root)
    change(
        root,
        lambda tree: tree["model"]["output_layer.weight"].add_(1),
        "mp_rank_00_001/model_optim_rng.pt",
    )
    with open_megatron(str(root)) as source, pytest.raises(ArtifactError, match="tied"):
        source.read("model.embedding.word_embeddings.weight")


def test_tensors_that_no_gpt_has_are_named(tmp_path: Path) -> None:
    root = write(tmp_path / "m", weights_of(random_gpt(GPT)), GPT, Layout())
    without_enum(root)
    change(root, lambda tree: tree["model"].update({"binary_head.weight": torch.ones(2, 32)}))
    with pytest.raises(ArtifactError, match=r"1 unexpected:\n    binary_head\.weight"):
        open_megatron(str(root))


def test_more_arguments_of_older_releases_are_understood(tmp_path: Path) -> None:
    args = {"norm_epsilon": None, "layernorm_epsilon": 1e-6, "num_experts": None}
    root = write(tmp_path / "m", weights_of(random_gpt(GPT)), GPT, Layout(args=args))
    assert read_all(root)[1].norm_epsilon == 1e-6
    rope = GPTConfig(**SIZES, position_embedding_type="rope")
    old = {"position_embedding_type": None, "use_rotary_position_embeddings": True}
    root = write(tmp_path / "r", weights_of(random_gpt(rope)), rope, Layout(args=old))
    assert read_all(root)[1].position_embedding_type == "rope"
