"""Mistakes on the command lines of flows, and the one line that answers each before any work."""

from __future__ import annotations

import re

import pytest

from tests.flows.processes import ROOT
from tests.stages.directly import run_program

RECIPE = str(ROOT / "recipes/quickstart.toml")

LINES = {
    "flows": "required: flow, arguments; python -m flows --help explains all$",
    "flows pretrain-gtp x": "'pretrain-gtp' is not one of .*: did you mean pretrain-gpt",
    "flows pretrain-gpt": "required: recipe; python -m flows.pretrain_gpt --help",
    "flows pretrain-gpt nowhere.toml": "recipe nowhere.toml cannot be read: there is no such file",
    "flows pretrain-gpt recipes/quikstart.toml": "nearest name is recipes/quickstart",
    "flows pretrain-gpt recipes": "recipe recipes cannot be read: this is a folder",
    "flows pretrain-gpt README.md": r"a config ends in .toml, .yaml, .yml or .json, not '.md'",
    f"flows pretrain-gpt {RECIPE} --rot x": r"--rot is not an option: did you mean --root\?",
    f"flows pretrain-gpt {RECIPE} --train-iters 9": "options of stages stand in the recipe",
    f"flows release {RECIPE} --checkpiont y": r"--checkpiont is not an option: .* --checkpoint\?",
    "flows run-stage tokenize": "required: --config",
    "flows.doctor --only stroe": "--only 'stroe' is not one of .*: did you mean store",
    "flows.gc --kep-runs 3": "--kep-runs is not an option: did you mean --keep-runs",
    "flows.gc --keep-runs x": "--keep-runs must be a whole number, got 'x'",
    "flows.gc --root nowhere": "nowhere: there is no such folder",
    "flows.gc --remove --dry-run": "--dry-run: not allowed with argument --remove",
    "flows.goodput nowhere": "required: checkpoint",
    "flows.browse --root nowhere": "--root nowhere: there is no such folder",
    "flows.browse --prt 1": r"--prt is not an option: did you mean --port\?",
    "flows.ui --prt 3": r"--prt is not an option: did you mean --port\?",
    "flows.ui --port x --root y": "--port must be a whole number, got 'x'",
    "flows.register --yrd x": r"--yrd is not an option: did you mean --yard\?",
    "flows.register --profile lokal": r"no yard profile 'lokal' .*; did you mean 'local'\?",
    "flows.collect_garbage --forse": "--forse is not an option; python -m flows.gc --help",
}


@pytest.mark.parametrize("line", LINES)
def test_a_mistake_is_answered_in_one_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module, *words = line.split()
    done = run_program(module, *words, expect=2)
    assert re.fullmatch(rf"error: .*{LINES[line]}.*\n", done.err), done.err
