"""Writing Megatron-LM checkpoints: the tensors of the format, which read back unchanged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.checkpoint.samples import PADDED_VOCAB, random_gpt, save_gpt
from tests.trainyard.conversion.megatron.converted_runs import (
    RUN,
    TOKENS,
    convert,
    convert_run,
    save_trained,
    trees,
)
from tests.trainyard.conversion.megatron.megatron_files import Layout, megatron_modules, write
from tests.trainyard.conversion.megatron.test_read import (
    GPT,
    LLAMA,
    QWEN,
    SIZES,
    assert_states,
    read_all,
    states_of,
    weights_of,
)
from trainyard.checkpoint.load import Checkpoint, open_checkpoint
from trainyard.conversion.megatron.names import flatten
from trainyard.conversion.megatron.read import open_megatron
from trainyard.conversion.vocabulary import Adjusted
from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig


def same(left: Any, right: Any) -> bool:
    return (
        isinstance(left, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    ) or (not isinstance(left, Tensor) and left == right)


CASES = [
    (GPT, Layout(spelling="engine", tp=2, pp=2)),
    (QWEN, Layout(spelling="core", tp=2)),
    (LLAMA, Layout(spelling="engine", pp=2, vpp=2)),
    (GPT, Layout(spelling="legacy", tp=2, pp=2)),
    (LLAMA, Layout(spelling="legacy", pp=2, vpp=2)),
]


def options_of(layout: Layout) -> dict[str, Any]:
    styles: dict[str, dict[str, Any]] = {
        "core": {"model_class": "core", "transformer_impl": "local"},
        "engine": {"model_class": "core"},
        "legacy": {"model_class": "legacy"},
    }
    degrees = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp}
    return {**styles[layout.spelling], **degrees}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("config", "layout"), CASES, ids=lambda v: getattr(v, "spelling", ""))
def test_the_files_are_those_of_the_format(
    tmp_path: Path, config: GPTConfig, layout: Layout
) -> None:
    """Key for key, in the same order, bit for bit those that were written by hand."""
    model = random_gpt(config)
    save_gpt(str(tmp_path / "run"), model, 100)
    made = convert_run(tmp_path, **options_of(layout), save_optimizer=False)
    layout = replace(layout, extra_state=False)
    wanted = write(tmp_path / "wanted", weights_of(model), config, layout)
    tracker = "latest_checkpointed_iteration.txt"
    assert (made / tracker).read_bytes() == (wanted / tracker).read_bytes() == b"100"
    left, right = trees(made), trees_by_hand(wanted)
    assert left.keys() == right.keys()
    for rank, tree in right.items():
        keys = [key for key in tree if key.startswith("model")]
        assert [key for key in left[rank] if key.startswith("model")] == keys
        for key in keys:
            ours, theirs = list(flatten(left[rank][key])), list(flatten(tree[key]))
            assert [path for path, _ in ours] == [path for path, _ in theirs]
            assert all(same(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))
        assert (left[rank]["checkpoint_version"], left[rank]["iteration"]) == (3.0, 100)
        for name, value in vars(tree["args"]).items():
            if name not in UNTOLD:
                assert getattr(left[rank]["args"], name) == value, name


UNTOLD = {
    *("params_dtype", "save", "data_path", "world_size", "attention_backend", "vocab_size"),
    *("consumed_train_samples", "exit_signal"),
}
"""Arguments of the run by hand, which are not those of the run that was converted."""


def trees_by_hand(folder: Path) -> dict[str, Any]:
    with megatron_modules():
        return trees(folder)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        pytest.param(*case, marks=[] if number in (0, 4) else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_what_is_written_reads_back(tmp_path: Path, config: GPTConfig, layout: Layout) -> None:
    weights = {n: t.bfloat16() for n, t in weights_of(random_gpt(config)).items()}
    states = states_of(weights)
    save_trained(tmp_path / "run", weights, states, config)
    advanced: list[int] = []
    expected: list[int] = []
    calls = {"advance": advanced.append, "expect": expected.append}
    made = convert_run(tmp_path, **options_of(layout), **calls)
    assert [sum(advanced)] == expected
    found, _ = read_all(made)
    assert_handed_on(found, weights, states)


def assert_handed_on(
    found: dict[str, Tensor], weights: dict[str, Tensor], states: dict[str, dict[str, Tensor]]
) -> None:
    for name, tensor in weights.items():
        assert torch.equal(found[f"model.{name}"], handed_on(name, tensor)), name
    params = {name: handed_on(name, tensor) for name, tensor in states["param"].items()}
    assert_states(found, {**states, "param": params})


def handed_on(name: str, tensor: Tensor) -> Tensor:
    """A weight as other programs get it, which score padding."""
    if not name.endswith(("word_embeddings.weight", "output_layer.weight")):
        return tensor
    mean = tensor[:TOKENS].mean(dim=0, dtype=torch.float32).to(tensor.dtype)
    return torch.cat([tensor[:TOKENS], mean.expand(PADDED_VOCAB - TOKENS, -1)])


@pytest.mark.slow
def test_legacy_to_core_and_back_is_the_same(tmp_path: Path) -> None:
    weights = {n: t.bfloat16() for n, t in weights_of(random_gpt(GPT)).items()}
    options = {"lr": 1e-4, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95}
    args = {**options, "adam_eps": 1e-8, "add_position_embedding": True}
    layout = Layout(spelling="legacy", tp=2, optimizer="plain", args=args)
    first = write(tmp_path / "legacy", weights, GPT, layout, states_of(weights))
    with open_megatron(str(first)) as source:
        core = convert(source, tmp_path / "core", model_class="core", tp=1, pp=2)
    with open_megatron(str(core)) as source:
        assert not source.is_legacy
        told_anew = Adjusted(source)  # what says other tokens keeps the options of the run
        again = convert(told_anew, tmp_path / "again", model_class="legacy", tp=2)
    wanted, found = trees_by_hand(first), trees(again)
    for rank, tree in wanted.items():
        for part in ("model", "optimizer", "opt_param_scheduler"):
            left, right = list(flatten(found[rank][part])), list(flatten(tree[part]))
            compared = [(p, v) for p, v in left if "param_groups" not in p and "fp32" not in p]
            by_path = dict(right)
            assert all(same(by_path[path], value) for path, value in compared)
            assert len(compared) == len(
                [p for p in by_path if "groups" not in p and "fp32" not in p]
            )
        key = "fp32_from_fp16_params"
        groups = zip(found[rank]["optimizer"][key], tree["optimizer"][key], strict=True)
        pairs = [pair for left, right in groups for pair in zip(left, right, strict=True)]
        assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.slow  # torch imports its compiler for this
def test_torch_takes_the_optimizer(tmp_path: Path) -> None:
    """What Megatron-LM does with it: `load_state_dict` of a torch optimizer over parameters in the
    order of the modules, those with weight decay apart."""
    weights = weights_of(random_gpt(GPT))
    states = states_of(weights)
    del states["param"]
    save_trained(tmp_path / "run", weights, states, GPT)
    (tree,) = trees(convert_run(tmp_path, transformer_impl="local")).values()
    parameters = {n: torch.nn.Parameter(t) for n, t in tree["model"].items()}
    decayed = [p for n, p in parameters.items() if p.ndim > 1]
    others = [p for n, p in parameters.items() if p.ndim == 1]
    optimizer = torch.optim.SGD([{"params": decayed}, {"params": others}])
    optimizer.load_state_dict(tree["optimizer"])
    for name, parameter in parameters.items():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], states["exp_avg"][name]), name
    assert [group["wd_mult"] for group in optimizer.param_groups] == [1.0, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("spelling", "wanted"),
    [("core", [1.0, 0.0]), ("engine", [1.0, 0.0]), ("legacy", [0.0, 1.0])],
)
def test_groups_are_in_the_order_of_those_of_megatron(
    tmp_path: Path, spelling: str, wanted: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Core 0.16 and later puts what decays first on every stage; the legacy models are of releases
    that put first what they meet first, which on a stage without an embedding is a norm."""
    weights = {n: t.bfloat16() for n, t in weights_of(random_gpt(GPT)).items()}
    save_trained(tmp_path / "run", weights, states_of(weights), GPT)
    layout = Layout(spelling=spelling, pp=2)
    first, last = trees(convert_run(tmp_path, **options_of(layout))).values()
    assert ("in the order of Megatron core 0.16 and later" in caplog.text) == (spelling == "core")
    for tree, expected in ((first, [1.0, 0.0]), (last, wanted)):
        groups = tree["optimizer"]["optimizer"]["param_groups"]
        assert [group["wd_mult"] for group in groups] == expected
        numbers = [number for group in groups for number in group["params"]]
        assert numbers == list(range(len(numbers)))
        moments = tree["optimizer"]["optimizer"]["state"]
        main = [t for members in tree["optimizer"]["fp32_from_fp16_params"] for t in members]
        assert [t.shape for t in main] == [moments[n]["exp_avg"].shape for n in numbers]
        for group in groups:
            vectors = {moments[number]["exp_avg"].ndim == 1 for number in group["params"]}
            assert vectors == {group["wd_mult"] == 0.0}


@pytest.mark.parametrize("is_of_core_16", [False, True])
def test_a_decoupled_learning_rate_is_recognised_by_either_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_of_core_16: bool,
) -> None:
    """Of --decoupled-lr; core 0.16 and later keeps `is_decoupled_lr` as it is for all."""
    monkeypatch.setitem(RUN, "decoupled_lr", 0.1)
    weights = {n: t.bfloat16() for n, t in weights_of(random_gpt(LLAMA)).items()}
    states = states_of(weights)
    save_trained(tmp_path / "run", weights, states, LLAMA)
    made = convert_run(tmp_path)
    assert "in the order of Megatron core 0.7 to 0.13" in caplog.text
    (path,) = made.rglob("model_optim_rng.pt")
    tree = torch.load(path, weights_only=False)
    groups = tree["optimizer"]["optimizer"]["param_groups"]
    found = [(group["wd_mult"], group["is_decoupled_lr"], group["max_lr"]) for group in groups]
    assert found == [(1.0, True, 0.1), (1.0, False, 1e-4), (0.0, False, 1e-4)]
    if is_of_core_16:
        for group in groups:
            group |= {"default_config": not group["is_decoupled_lr"], "is_decoupled_lr": False}
        torch.save(tree, path)
    assert_states(read_all(made)[0], {"exp_avg": states["exp_avg"]})


@pytest.mark.slow
@pytest.mark.parametrize("true_vocab_size", [257, 100, None])
def test_the_vocabulary_is_cut_or_its_last_row_repeated(
    tmp_path: Path, true_vocab_size: int | None
) -> None:
    model = random_gpt(LLAMA)
    save_gpt(str(tmp_path / "run"), model, 100)
    made = convert_run(tmp_path, tp=2, true_vocab_size=true_vocab_size)
    rows = {257: 512, 100: 256, None: PADDED_VOCAB}[true_vocab_size]
    found, _ = read_all(made)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        before, after = model.state_dict()[name], found[f"model.{name}"]
        assert after.shape[0] == rows
        assert torch.equal(after[:PADDED_VOCAB], before[:rows])
        added = max(rows - PADDED_VOCAB, 0)
        assert torch.equal(after[PADDED_VOCAB:], before[-1:].expand(added, -1))
    if rows < PADDED_VOCAB:
        return
    with open_megatron(str(made)) as source:
        back = convert(source, tmp_path / "back", tp=1, true_vocab_size=257)
    assert torch.equal(
        read_all(back)[0]["model.output_layer.weight"], model.state_dict()["output_layer.weight"]
    )


def test_a_checkpoint_without_a_step_becomes_a_release(tmp_path: Path) -> None:
    whole = weights_of(random_gpt(GPT))
    root = write(tmp_path / "m", whole, GPT, Layout(release=True))
    with open_megatron(str(root)) as source:
        made = convert(source, tmp_path / "made", model_class="legacy")
    assert (made / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (made / "release" / "mp_rank_00" / "model_optim_rng.pt").exists()


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (
            LLAMA,
            {"tp": 4},
            "2 key and value heads must be divisible .*; choose --target-.*-size 2$",
        ),
        (GPT, {"pp": 3}, "4 layers must be divisible by 3 pipeline stages"),
        (GPT, {"vpp": 2}, "at least 2"),
        (GPT, {"tp": 0}, "at least 1"),
        (QWEN, {"model_class": "legacy"}, "legacy model class of Megatron-LM has no --qk-layer"),
        (GPTConfig(**SIZES, quick_gelu=True), {}, "no argument for --quick-gelu"),
        (
            replace(
                LLAMA,
                use_rope_scaling=True,
                rope_scaling_original_max_position_embeddings=4096,
            ),
            {},
            "--rope-scaling-original-.* must be 8192 for Megatron-LM, got 4096; use",
        ),
        (
            GPTConfig(**SIZES, ffn_hidden_size=46),
            {"tp": 4},
            r"linear_fc1\.bias has 46 rows, which must be divisible by 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, config: GPTConfig, options: dict[str, Any], words: str
) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(config), 100)
    with pytest.raises(ConfigError, match=words):
        convert_run(tmp_path, **options)
    assert not (tmp_path / "made").exists()


def test_an_optimizer_without_its_options_is_left_out_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT), 100)
    made = convert_run(tmp_path)
    (tree,) = trees(made).values()
    assert "optimizer" not in tree
    (line,) = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert "does not have the run's --lr" in line


@pytest.mark.slow
def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPT), 100)
    with open_checkpoint(str(tmp_path / "run")) as checkpoint:
        for name in "ab":
            convert(checkpoint, tmp_path / name, tp=2)
    files = {p.relative_to(tmp_path / "a"): p for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert len(files) == 3
    for name, path in files.items():
        assert path.read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_each_tensor_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(random_gpt(LLAMA))
    save_trained(tmp_path / "run", weights, states_of(weights), LLAMA)
    read, names = Checkpoint.read_slice, Counter[str]()

    def counted(self: Checkpoint, name: str, *box: Any) -> Tensor:
        names[name] += 1
        return read(self, name, *box)

    monkeypatch.setattr(Checkpoint, "read_slice", counted)
    convert_run(tmp_path, tp=2)
    assert any("linear_fc2" in name for name in names), "cut by columns"
    assert set(names.values()) == {1}
