"""One recipe started twice at once: one flow run works, the other waits and reuses its output."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.yard.yard import COLLECTED, FLOW_SECONDS, HEADLINE, Ended, Yard

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.timeout(900)]

DIGEST = re.compile(r"^[\d.]+ s +([0-9a-f]{12})\b")


def run_twice(yard: Yard, recipe: str) -> list[Ended]:
    """Start the flow twice, and wait for both."""
    flows = [yard.start("-m", "flows.pretrain_gpt", recipe) for _ in range(2)]
    with ThreadPoolExecutor() as pool:  # a pipe that nobody reads would stop its flow
        outputs = list(pool.map(lambda flow: flow.communicate(timeout=FLOW_SECONDS), flows))
    return [
        Ended(flow.returncode, out, err, 0.0)
        for flow, (out, err) in zip(flows, outputs, strict=True)
    ]


def digests(ended: Ended) -> dict[str, str]:
    """Digests of each stage's output, as a flow run printed them."""
    ends = [(job, DIGEST.match(rest)) for job, _, rest in HEADLINE.findall(ended.err)]
    return {job: found[1] for job, found in ends if found}


def outcomes(yard: Yard) -> dict[str, list[str]]:
    """The outcomes of the attempts at each stage, "ran" or "noop", in order."""
    found: dict[str, list[str]] = {}
    for path in (yard.folder / "yard").rglob("outcome.json"):
        outcome = json.loads(path.read_text())["outcome"]
        found.setdefault(path.parent.parent.name, []).append(outcome)
    return {job: sorted(outcome, reverse=True) for job, outcome in found.items()}


def ledger_steps(checkpoint: Path) -> list[int]:
    lines = (checkpoint / "ledger.jsonl").read_text().splitlines()
    return [step for line in lines if (step := json.loads(line).get("step"))]


def test_of_two_whole_flows_one_makes_everything_and_the_other_reuses_it(tmp_path: Path) -> None:
    yard = Yard(tmp_path, {"TRAINYARD_CACHE": str(tmp_path / "cache")})
    ended = run_twice(yard, yard.recipe(COLLECTED))
    assert [each.status for each in ended] == [0, 0], [each.err for each in ended]
    made, reused = sorted(ended, key=lambda each: "reused" in each.states().values())
    assert set(made.states().values()) == {"done"}, made.err
    assert reused.states() == dict.fromkeys(made.states(), "reused"), reused.notes()
    assert f"another flow run works on {yard.tiny}" in reused.err
    assert "another flow run works" not in made.err
    assert digests(made) == digests(reused)
    assert "pretrain" in digests(made)
    assert made.out == reused.out  # the run card

    of_stages = outcomes(yard)
    assert of_stages["pretrain"] == ["ran", "noop"]
    assert all(attempts.count("ran") == 1 for attempts in of_stages.values()), of_stages
    assert ledger_steps(yard.tiny / "checkpoint") == list(range(1, 7))
    assert yard.wait_until_empty(15) == []
