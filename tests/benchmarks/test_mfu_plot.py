"""The picture of MFU shows the figures of benchmarks/README.md."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.mfu_plot import MEGATRON, OURS, SVG, chart, num_params, picture
from benchmarks.shapes import SHAPES

README = (Path(__file__).parents[2] / "benchmarks/README.md").read_text()


def test_the_picture_is_drawn_anew_after_a_change() -> None:
    assert SVG.read_text() == f"{picture(chart())}\n"


def test_the_picture_has_the_figures_of_the_benchmarks() -> None:
    rows = dict(re.findall(r"^\| (gpt-345m|gpt-1\.3b|llama-8b-half), seq (.*)$", README, re.M))
    for name, row in rows.items():
        assert re.findall(r"tok/s, ([\d.]+) %", row) == [str(OURS[name]), str(MEGATRON[name])]
    assert rows.keys() == MEGATRON.keys()
    assert re.search(rf"gpt-125m 481,664 tok/s, {OURS['gpt-125m']} %", README)


def test_parameters_of_shapes() -> None:
    assert round(num_params(SHAPES["gpt-345m"]) / 1e6) == 354
    assert round(num_params(SHAPES["llama-8b-half"]) / 1e9, 1) == 4.5
