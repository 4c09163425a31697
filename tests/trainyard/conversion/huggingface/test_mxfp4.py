"""Experts in MXFP4 are read as `transformers` reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.trainyard.conversion.huggingface.hf_models import make
from trainyard.conversion.huggingface.mxfp4 import NUMBERS, unpacked
from trainyard.conversion.huggingface.read import open_huggingface
from trainyard.errors import ArtifactError, ConfigError

transformers = pytest.importorskip("transformers")

OURS = "model.decoder.layers.1.mlp.experts.linear_fc1.weight"
THEIRS = "model.layers.1.mlp.experts.gate_up_proj"


def packed(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of 4 experts with 48 rows of 32 numbers."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (4, 48, 1, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 130, (4, 48, 1), generator=generator, dtype=torch.uint8)
    return blocks, scales


def test_numbers_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = packed()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(unpacked(blocks, scales), expected)


def test_a_byte_is_two_numbers_the_lower_half_first() -> None:
    blocks = torch.tensor([0x1F] + [0] * 15, dtype=torch.uint8).view(1, 1, 1, 16)
    row = unpacked(blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8))[0, :, 0]
    assert row[:3].tolist() == [2 * NUMBERS[0xF], 2 * NUMBERS[0x1], 0.0] == [-12.0, 1.0, 0.0]


def folder(path: Path, **more: torch.Tensor) -> None:
    """A gpt-oss whose second layer has one matrix in MXFP4."""
    make("gpt-oss", path)
    file = path / "model.safetensors"
    tensors = {k: t.bfloat16() for k, t in safetensors.torch.load_file(file).items()}
    del tensors[THEIRS]
    blocks, scales = packed()
    tensors |= {f"{THEIRS}_blocks": blocks, f"{THEIRS}_scales": scales}
    safetensors.torch.save_file(tensors | {THEIRS + key: t for key, t in more.items()}, file)
    describe(path, "mxfp4")


def describe(path: Path, method: str) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "modules_to_not_convert": ["x"]}
    (path / "config.json").write_text(json.dumps(config))


def test_a_folder_with_experts_in_mxfp4_is_read_in_bfloat16(tmp_path: Path) -> None:
    folder(tmp_path)
    rows = unpacked(*packed()).transpose(1, 2)
    with open_huggingface(str(tmp_path)) as source:
        assert source.specs[OURS].dtype == "BF16"
        made = source.read(OURS)
    assert torch.equal(made, torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"_scales": torch.zeros(4, 48, 2, dtype=torch.uint8)}, r"_scales is \[4, 48, 2\], wanted"),
        ({"_scales": torch.zeros(4, 48, 1)}, "MXFP4 has bytes"),
        ({"": torch.zeros(4, 32, 48)}, "in MXFP4 and as it is"),
    ],
)
def test_damaged_blocks_are_refused(
    more: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    folder(tmp_path, **more)
    with pytest.raises(ArtifactError, match=said):
        open_huggingface(str(tmp_path))


def test_another_quantisation_is_refused(tmp_path: Path) -> None:
    folder(tmp_path)
    describe(tmp_path, "gptq")
    with pytest.raises(ConfigError, match="reads only mxfp4"):
        open_huggingface(str(tmp_path))
