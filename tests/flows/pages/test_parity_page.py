"""The page of the gate of a release."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.pages.parity_page import parity_rows, read_parity
from tests.stages.directly import run_program
from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from trainyard.models.gpt.config import GPTConfig

ROW = {
    "engine": "dynamic, whole\x1bprompts",
    "num_prompt_tokens": 990,
    "num_new_tokens": 64,
    "max_difference": 0.000123456,
    "mean_difference": 1e-6,
    "num_likeliest": 63,
}


def test_an_engine_has_a_row() -> None:
    assert parity_rows({"rows": [ROW]}) == [
        {
            "engine": "dynamic, whole\\x1bprompts",
            "tokens": "1,054",
            "largest difference, nats": "0.000123",
            "mean": "1e-06",
            "same likeliest token": "63 of 64",
        }
    ]


@pytest.mark.slow
def test_what_the_stage_publishes_is_read(tmp_path: Path) -> None:
    model = GPTConfig(num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16)
    save_gpt(str(tmp_path / "run"), random_gpt(model))
    out = str(tmp_path / "out")
    assert read_parity(out) is None
    words = ("--load", str(tmp_path / "run"), "--output-dir", out, "--device", "cpu")
    run_program("stages.parity", *words, "--num-prompts", "2", expect=0)
    found = read_parity(out)
    assert found == json.loads(Path(out, "parity.json").read_text())
    assert len(parity_rows(found)) == 5
