"""Finding optimizer states in the buckets of Megatron's buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.checkpoint.samples import PADDED_VOCAB
from tests.trainyard.conversion.megatron import test_read as ranks
from tests.trainyard.conversion.megatron.test_read import states_of
from tests.trainyard.conversion.torch_dist.torch_dist_buckets_files import (
    Buckets,
    laid_out,
    states_of_ranks,
    write_buckets,
)
from tests.trainyard.conversion.torch_dist.torch_dist_files import Stored
from trainyard.conversion.megatron.optimizer import Unknown
from trainyard.conversion.source import model_shapes
from trainyard.conversion.torch_dist.buckets import (
    KINDS,
    Joined,
    check_places,
    states_in_buckets,
)
from trainyard.conversion.torch_dist.index import StoredTensor
from trainyard.conversion.torch_dist.read import open_torch_dist
from trainyard.models.gpt.config import GPTConfig

GPT, LLAMA, QWEN = ranks.GPT, ranks.LLAMA, ranks.QWEN
TIED_LLAMA = replace(LLAMA, untie_embeddings_and_output_weights=False)
UNTIED_GPT = replace(GPT, untie_embeddings_and_output_weights=True)

CONFIGS = {
    "gpt": GPT,
    "untied gpt": UNTIED_GPT,
    "llama": LLAMA,
    "tied llama": TIED_LLAMA,
    "qwen": QWEN,
}

Run = dict[str, Stored]


@cache
def sample(config: GPTConfig) -> dict[str, dict[str, Tensor]]:
    shapes = model_shapes(config, PADDED_VOCAB)
    return states_of({name: torch.empty(shape) for name, shape in shapes.items()})


def weights(config: GPTConfig) -> dict[str, Tensor]:
    return {name: tensor.bfloat16() for name, tensor in sample(config)["param"].items()}


def found(run: Run, config: GPTConfig, args: dict[str, Any]) -> dict[str, Joined]:
    stored = {key: StoredTensor("float32", held.shape, ()) for key, held in run.items()}
    return states_in_buckets(stored, list(run), model_shapes(config, PADDED_VOCAB), config, args)


def tensors(run: Run) -> Any:
    """Vectors that no file holds."""

    def read(name: str, offset: tuple[int], shape: tuple[int]) -> Tensor:
        return run[name].whole()[offset[0] : offset[0] + shape[0]]

    return SimpleNamespace(read=read)


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(
    ("config", "how"),
    [
        ("gpt", Buckets()),
        ("gpt", Buckets(spelling="core", size=3000, dp=3)),
        ("gpt", Buckets(tp=2, size=1, dp=2)),
        ("gpt", Buckets(tp=2, pp=2, size=4000)),
        ("gpt", Buckets(spelling="core", tp=2, pp=2, vpp=2, size=2000, dp=4)),
        ("untied gpt", Buckets(pp=2, dp=3)),
        ("llama", Buckets(spelling="core", tp=2, pp=2, size=5000)),
        ("llama", Buckets(pp=4, dp=2)),
        ("tied llama", Buckets(tp=2, pp=2, vpp=2)),
        ("tied llama", Buckets(size=3000, dp=2)),
        ("qwen", Buckets(tp=2, pp=2, size=2000)),
        ("qwen", Buckets(spelling="core", pp=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_state_is_assigned_to_its_parameter(config: str, how: Buckets) -> None:
    check(CONFIGS[config], how)


def check(config: GPTConfig, how: Buckets) -> None:
    states = sample(config)
    run = states_of_ranks(states, config, how)
    assert how.size is None or any("bucket_idx_1" in key for key in run)
    places = found(run, config, how.args)
    assert places.keys() == states["param"].keys()
    for kind in KINDS:
        wrong = [
            name
            for name, joined in places.items()
            if not torch.equal(joined.read(tensors(run), kind), states[kind][name])
        ]
        assert wrong == []
    check_places(places, tensors(run), weights(config).__getitem__)


def test_padding_between_parameters_is_not_read() -> None:
    run = states_of_ranks(sample(GPT), GPT, Buckets(tp=2, pp=2))
    assert any(held.whole().isnan().any() for held in run.values())


def test_the_padding_before_a_shared_embedding_belongs_to_the_bucket_before_it() -> None:
    """A bucket of 100 numbers ends at 128, where the embedding begins."""
    ((begin, unpadded, end, _), (start, *_)) = laid_out([(100, False), (64, True)], None, 1)
    assert (begin, unpadded, end, start) == (0, 128, 128, 128)
    odd = replace(TIED_LLAMA, hidden_size=36, kv_channels=10)
    assert 36 * 4 * 10 % 64  # the matrix before it
    check(odd, Buckets(pp=4))


# --- what does not come out -------------------------------------------------------------------

HOW = Buckets(tp=2, pp=2, size=4000)
FIRST = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)."


def last_bucket(run: Run) -> int:
    return max(int(k.split("bucket_idx_")[1].split(".")[0]) for k in run if k.startswith(FIRST))


def lose(run: Run, part: str) -> None:
    for key in [key for key in run if part in key]:
        del run[key]


def put(run: Run, bucket: str, size: int = 64, kinds: tuple[str, ...] = KINDS) -> None:
    run.update({f"{bucket}{kind}": Stored((size,), []) for kind in kinds})


def resize(run: Run, number: int, by: int) -> None:
    bucket = f"{FIRST}bucket_idx_{number}."
    put(run, bucket, run[f"{bucket}{KINDS[0]}"].shape[0] + by)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda run: resize(run, 0, 64),
            r"would end at \d+, but optimizer.*bucket_idx_0\. ends at",
        ),
        (
            lambda run: resize(run, 1, -64),
            r"would end at \d+, but optimizer.*bucket_idx_1\. ends at",
        ),
        (lambda run: lose(run, f"{FIRST}bucket_idx_1."), "buckets of .* are missing"),
        (
            lambda run: lose(run, f"{FIRST}bucket_idx_{last_bucket(run)}."),
            "no bucket is left",
        ),
        (lambda run: put(run, f"{FIRST}bucket_idx_{last_bucket(run) + 1}."), "before the end of"),
        (
            lambda run: lose(run, f"{FIRST}bucket_idx_1.exp_avg_sq"),
            r"bucket_idx_1\.exp_avg_sq is missing",
        ),
        (
            lambda run: put(run, f"{FIRST}bucket_idx_1.", kinds=("exp_avg",)),
            "vectors of .* have different sizes: 64 and",
        ),
        (
            lambda run: lose(run, ".dp_group_idx_3."),
            "has buffers of 3 ranks, but its args say tp 2, pp 2",
        ),
        (
            lambda run: put(run, f"{FIRST.replace('gbuf_idx_0', 'gbuf_idx_1')}bucket_idx_0."),
            "has 5 buffers, but its stages need 4",
        ),
        (
            lambda run: put(run, f"{FIRST}bucket_idx_0.", kinds=("momentum",)),
            "momentum is not the key of a known buffer",
        ),
    ],
)
def test_buckets_that_do_not_fit_the_model_say_why(
    change: Callable[[Run], None], words: str
) -> None:
    run = dict(states_of_ranks(sample(GPT), GPT, HOW))
    found(run, GPT, HOW.args)
    change(run)
    with pytest.raises(Unknown, match=words):
        found(run, GPT, HOW.args)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"transformer_impl": None}, "order .* is not known"),
        ({"transformer_impl": "mine"}, "transformer_impl 'mine'"),
        ({"use_kitchen": True}, "use_kitchen"),
        (
            {"tensor_model_parallel_size": None},
            "do not give the numbers of tensor and pipeline ranks",
        ),
        ({"tensor_model_parallel_size": -1}, "tensor_model_parallel_size -1"),
        ({"pipeline_model_parallel_size": 2**60}, "pipeline_model_parallel_size"),
        ({"pipeline_model_parallel_size": 1}, "of 4 ranks, but its args say tp 2, pp 1"),
        ({"virtual_pipeline_model_parallel_size": 2}, "would end at|its stages"),
        ({"virtual_pipeline_model_parallel_size": 2**19}, "524288 virtual stages"),
        ({"decoder_first_pipeline_num_layers": 3}, "would end at|before the end"),
        ({"decoder_first_pipeline_num_layers": 30}, "give no valid stages"),
        ({"standalone_embedding_stage": True}, "do not determine the layers of its stages"),
        (
            {"pipeline_model_parallel_layout": ("Et", "tL")},
            "do not determine the layers of its stages",
        ),
    ],
    ids=str,
)
def test_args_of_another_run_say_why(args: dict[str, Any], words: str) -> None:
    run = states_of_ranks(sample(GPT), GPT, HOW)
    with pytest.raises(Unknown, match=words):
        found(run, GPT, HOW.args | args)


@pytest.mark.parametrize("config", [GPT, LLAMA, QWEN], ids=["gpt", "llama", "qwen"])
def test_another_order_of_modules_is_detected_by_the_weights(config: GPTConfig) -> None:
    """All its sizes come out, since layers have the same parameters."""
    run = states_of_ranks(sample(config), config, Buckets(spelling="core"))
    places = found(run, config, Buckets(spelling="engine").args)
    with pytest.raises(Unknown, match="registered in another order"):
        check_places(places, tensors(run), weights(config).__getitem__)


# --- files ------------------------------------------------------------------------------------

OBJECTS: dict[str, Any] = {
    "optimizer": {"param_groups": [{"lr": 1e-4, "step": 98.0}, {"lr": 1e-4, "step": 98.0}]},
    "grad_scaler": {
        "scale": torch.tensor([1024.0]),
        "growth_tracker": 7,
        "hysteresis_tracker": 2,
    },
    "per_bucket_numel": [{(torch.bfloat16, torch.float32): [128]}],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "how"),
    [(GPT, Buckets(tp=2, pp=2, size=4000, dp=2)), (LLAMA, Buckets(spelling="core", dp=3))],
    ids=["gpt", "llama"],
)
def test_a_folder_gives_its_optimizer(tmp_path: Path, config: GPTConfig, how: Buckets) -> None:
    states, whole = sample(config), weights(config)
    run = states_of_ranks(states, config, how)
    root = write_buckets(tmp_path / "m", whole, config, how, run, OBJECTS)
    wanted = {f"model.{name}": tensor for name, tensor in whole.items()}
    for kind, held in states.items():
        wanted |= {f"optimizer.{kind}.{name}": tensor for name, tensor in held.items()}
    with open_torch_dist(str(root)) as source:
        assert source.specs.keys() == wanted.keys()
        wrong = [n for n, tensor in wanted.items() if not torch.equal(source.read(n), tensor)]
        assert wrong == []
        assert (source.step, source.num_updates) == (100, 98)
        assert source.scaler == {"scale": 1024.0, "growth_tracker": 7, "hysteresis_tracker": 2}


@pytest.mark.slow
def test_fp32_weights_are_not_kept_twice(tmp_path: Path) -> None:
    states, how = sample(GPT), Buckets(dtype="torch.float32")
    run = states_of_ranks(states, GPT, how)
    root = write_buckets(tmp_path / "m", states["param"], GPT, how, run)
    with open_torch_dist(str(root)) as source:
        assert {name.split(".")[1] for name in source.specs if name.startswith("optimizer.")} == {
            "exp_avg",
            "exp_avg_sq",
        }
        assert source.num_updates == 100  # nothing says how often
        assert source.scaler == {}


@pytest.mark.slow
def test_states_in_one_object_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gathered = {"param_state": {0: {"exp_avg": torch.ones(64)}}}
    root = write_buckets(tmp_path / "m", weights(GPT), GPT, Buckets(), {}, gathered)
    with open_torch_dist(str(root)) as source:
        assert all(name.startswith("model.") for name in source.specs)
    (line,) = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert "param_state/shard_0_1 is not the key of a known buffer" in line


@pytest.mark.slow
def test_another_order_than_the_args_say_converts_only_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = states_of_ranks(sample(LLAMA), LLAMA, Buckets(spelling="core"))
    how = Buckets(spelling="engine")
    root = write_buckets(tmp_path / "m", weights(LLAMA), LLAMA, how, run, OBJECTS)
    with open_torch_dist(str(root)) as source:
        assert all(name.startswith("model.") for name in source.specs)
        assert (source.num_updates, source.scaler) == (0, {})
        source.read("model.decoder.final_layernorm.weight")
    (line,) = [r.getMessage() for r in caplog.records if "is left out" in r.getMessage()]
    assert "registered in another order" in line
    assert "--dist-ckpt-optim-fully-reshardable" in line
