"""The quantize stage: a folder that evaluates nearly as the checkpoint did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.quantize.config import QuantizeConfig
from stages.quantize.run import run
from tests.stages.directly import run_directly
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.conversion.huggingface.test_compressed import MODEL
from trainyard.config import from_dict
from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    save_gpt(folder, random_gpt(MODEL), step=7)
    return folder


def quantize(checkpoint: str, out: Path, **options: Any) -> dict[str, Any]:
    where = {"load_dir": checkpoint, "save_dir": str(out), "device": "cpu"}
    return run_directly(QuantizeConfig, run, **where, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [{"method": "fp8"}, {"method": "int8"}, {"method": "int8", "layout": "modelopt"}],
    ids=["fp8", "int8", "modelopt"],
)
def test_perplexity_is_measured_before_and_after(
    checkpoint: str, tmp_path: Path, given: dict[str, str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The yard was quiet before the first train came in. " * 4)
    out = tmp_path / "out"
    metrics = quantize(checkpoint, out, **given, valid_data=str(text), seq_length=16)
    assert metrics["ppl_ratio"] == pytest.approx(1, abs=0.02)
    assert metrics["ppl_before"] != metrics["ppl_after"]  # other weights were scored
    assert metrics["bytes_after"] < metrics["bytes_before"]
    document = json.loads((out / "quantization.json").read_text())
    assert document["step"] == 7
    # What was not given is not there: folders of earlier versions keep their digests.
    assert {k: v for k, v in document.items() if k in ("method", "layout")} == given
    assert document["ppl_after"] == metrics["ppl_after"]
    assert json.loads((out / "config.json").read_text())["quantization_config"]
    # What was written is a checkpoint again; to quantize it twice changes little.
    again = quantize(str(out), tmp_path / "again", **given)
    assert again["bytes_after"] == metrics["bytes_after"]


def test_what_cannot_be_quantized_is_refused_before_anything_is_written(
    checkpoint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--strategy tensor: int8 weights have a scale for each"):
        from_dict(
            QuantizeConfig,
            {"load_dir": "a", "save_dir": "b", "method": "int8", "strategy": "tensor"},
        )
    with pytest.raises(ConfigError, match="--layout modelopt is of int8 weights, and --method is"):
        from_dict(QuantizeConfig, {"load_dir": "a", "save_dir": "b", "layout": "modelopt"})
    other = GPTConfig(num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=64)
    save_gpt(str(tmp_path / "gpt2"), random_gpt(other))
    with pytest.raises(ConfigError, match="a GPT2LMHeadModel is not quantized"):
        quantize(str(tmp_path / "gpt2"), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))
    (tmp_path / "full").mkdir()
    for name in ("pytorch_model.bin", "hf_quant_config.json"):
        strange = tmp_path / "full" / name
        strange.write_bytes(b"")
        with pytest.raises(ConfigError, match=f"--save-dir .* has {name}, which this stage"):
            quantize(checkpoint, tmp_path / "full")
        strange.unlink()
