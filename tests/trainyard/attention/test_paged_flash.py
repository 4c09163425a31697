"""The flash-attn package over blocks: each generation is asked for what torch computes, and what
it cannot is refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest
import torch

from tests.trainyard.attention.flash_packages import install
from tests.trainyard.attention.paged_cases import CASES, Case, inputs_of
from tests.trainyard.inference.dynamic.engines import build_engine, requests_of, run_all
from tests.trainyard.inference.small_models import build, decoder_of, some_prompts
from trainyard.attention.paged import gathered_attention, paged_attention
from trainyard.attention.paged_flash import BlockNeeds, problem_of_blocks
from trainyard.attention.select import Device, _flash_attn_version
from trainyard.errors import ConfigError
from trainyard.inference.static import run_requests
from trainyard.testing.tolerances import FP32_SUM_ORDER

HOPPER = {version: Device("cuda", (9, 0), flash_attn=version) for version in (0, 2, 3, 4)}
BF16 = BlockNeeds("bfloat16", "bfloat16", 256, 128, 128, sink=False)


def needs_of(case: Case) -> BlockNeeds:
    sizes = (case.block_size, case.width, case.value_width)
    return BlockNeeds("bfloat16", "bfloat16", *sizes, sink=case.sink)


TAKEN = {
    f"{version}-{name}": (version, fitted)
    for version in (2, 3, 4)
    for name, case in CASES.items()
    for fitted in (case._replace(block_size=256) if version == 2 else case,)
    if problem_of_blocks(HOPPER[version], needs_of(fitted)) is None
}


@pytest.mark.parametrize(("version", "case"), TAKEN.values(), ids=TAKEN)
def test_each_generation_is_told_what_torch_is(
    monkeypatch: pytest.MonkeyPatch, version: int, case: Case
) -> None:
    install(monkeypatch, version)
    inputs = inputs_of(case)
    q, keys, values, layout, softmax, window = inputs
    left = -1 if window is None else window[0]
    sequences = (layout.tables, layout.starts, layout.lengths)
    right = gathered_attention(q, keys, values, sequences, softmax, left)
    torch.testing.assert_close(paged_attention(*inputs, version), right, **FP32_SUM_ORDER)


def test_generations_take_all_cases_but_these() -> None:
    for version, missing in {2: {"odd heads"}, 3: {"odd heads"}, 4: {"odd heads"}}.items():
        sinks = set() if version == 4 else {name for name, case in CASES.items() if case.sink}
        taken = {name.partition("-")[2] for name in TAKEN if name.startswith(f"{version}-")}
        assert taken == set(CASES) - missing - sinks


@pytest.mark.parametrize(
    ("device", "changes", "words"),
    [
        (Device("cpu"), {}, "needs a CUDA device, not cpu"),
        (HOPPER[0], {}, "no flash-attn is installed"),
        (Device("cuda", (7, 5), flash_attn=2), {}, "flash-attn 2 needs .* 8.0 or more, not 7.5"),
        (Device("cuda", (12, 0), flash_attn=4), {}, "4 has no blocks of keys on .* 12.0"),
        (HOPPER[4], {"dtype": "float32"}, "computes in bf16 and fp16 .--bf16, --fp16., not float"),
        (HOPPER[4], {"kv_dtype": "float8_e4m3fn"}, "keys in bfloat16, not in float8_e4m3fn"),
        (HOPPER[3], {"value_width": 64}, "values as wide as keys, not 64 and 128"),
        (HOPPER[3], {"width": 576, "value_width": 576}, "no heads of 576 channels"),
        (HOPPER[2], {"width": 36, "value_width": 36}, "no heads of 36 channels"),
        (
            Device("cuda", (10, 0), flash_attn=4),
            {"width": 192, "value_width": 192},
            "no heads of 192 channels on this device",
        ),
        (HOPPER[2], {"block_size": 64}, "a multiple of 256 tokens, not 64 .--inference-dynamic"),
        (HOPPER[3], {"sink": True}, "flash-attn 3 has no sinks .--softmax-type"),
    ],
)
def test_what_a_generation_cannot_is_said(
    device: Device, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        raise ConfigError(str(problem_of_blocks(device, BF16._replace(**changes))))


def test_what_a_generation_can_has_no_problem() -> None:
    for version in (2, 3, 4):
        assert problem_of_blocks(HOPPER[version], BF16) is None
    assert problem_of_blocks(HOPPER[4], BF16._replace(sink=True, block_size=12)) is None
    blackwell = Device("cuda", (10, 0), flash_attn=4)
    assert problem_of_blocks(blackwell, BF16._replace(width=256, value_width=256)) is None


def test_an_engine_refuses_it_before_any_request() -> None:
    with pytest.raises(ConfigError, match=r"--inference-attention-backend flash: .* not cpu; leav"):
        build_engine(build("llama"), inference_attention_backend="flash")
    with pytest.raises(ConfigError, match="flash: it takes no latents"):
        build_engine(build("deepseek"), inference_attention_backend="flash")


@pytest.mark.parametrize("version", [3, 4])
def test_what_earlier_texts_left_in_blocks_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """The stand-ins multiply it by 0, as kernels that load whole tiles do: NaN would remain."""
    install(monkeypatch, version)
    model, prompts = build("llama"), some_prompts(3, 17, 9, 12, 5)
    requests = requests_of(prompts, 12)
    expected = run_requests(decoder_of(model, prompts, 12), requests).outputs
    engine = build_engine(model)
    cache = engine._runner.cache
    cache.flash_version = version
    for kept in cache.tensors():
        kept.fill_(torch.nan)
    assert [c.tokens for c in run_all(engine, requests, arrive_every=2)] == expected


def test_the_newest_installed_generation_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: set[str] = set()
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in modules else None)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _flash_attn_version((9, 0)) == 0
    # Generation 2.8 comes with an early flash_attn.cute, which is not generation 4.
    modules |= {"flash_attn", "flash_attn.cute"}
    versions["flash_attn"] = "2.8.3"
    assert _flash_attn_version((9, 0)) == 2
    modules.add("flash_attn_interface")
    assert [_flash_attn_version(each) for each in ((8, 0), (9, 0), (10, 0))] == [2, 3, 2]
    versions["flash-attn-4"] = "4.0.0b36"
    assert [_flash_attn_version(each) for each in ((8, 0), (9, 0), (10, 0))] == [2, 4, 4]
