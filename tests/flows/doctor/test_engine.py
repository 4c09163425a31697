"""The images of a yard: tried beside each other, and within a time that is enough for all."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from requests.exceptions import ConnectionError as RequestsConnectionError
from requests.exceptions import ReadTimeout

from flows.doctor import engine
from flows.doctor.backends import CHECKS
from flows.doctor.check import CheckResult, State
from flows.doctor.context import YardContext
from flows.stage_configs import CONFIGS
from flows.yard.read_profile import parse_profile
from trainyard.errors import InfrastructureError
from trainyard.version import VERSION


def asked(monkeypatch: pytest.MonkeyPatch, smoke: Callable[[str], str]) -> CheckResult:
    """The answer of an engine that has all images and in which a stage starts, or says why not."""

    def ask(yard: YardContext, question: Callable[[Any], Any], seconds: float = 0) -> Any:
        return question(None)

    monkeypatch.setattr(engine, "_ask", ask)
    monkeypatch.setattr(engine, "_labels", lambda *_: {engine.VERSION_LABEL: VERSION})
    monkeypatch.setattr(engine, "_smoke", lambda client, name, stage, *_: smoke(stage))
    document = tomllib.loads('block = "container"\nimage = "ours/{stage}:1"\n')
    return engine.engine_image(YardContext(parse_profile(document, "site"), "/yard"))


def test_four_images_are_tried_at_a_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, running, most, tried = threading.Lock(), 0, 0, list[str]()
    four = threading.Barrier(4)

    def smoke(stage: str) -> str:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
            tried.append(stage)
            is_of_the_first = len(tried) <= 4
        if is_of_the_first:
            four.wait(20)  # one after another they would never meet
        with lock:
            running -= 1
        return ""

    answer = asked(monkeypatch, smoke)
    assert answer.state is State.OK
    assert f"{len(CONFIGS)} images of version {VERSION}" in answer.message
    assert sorted(tried) == sorted(CONFIGS)
    assert most == 4


def test_the_first_stage_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(iter(CONFIGS))
    answer = asked(monkeypatch, lambda stage: f"status 1: no {stage}")
    assert answer.state is State.FAIL
    assert f"stage {first} does not start in it: status 1: no {first}" in answer.message


def test_a_yard_whose_images_are_all_slow_is_not_cut_off() -> None:
    (check,) = [check for check in CHECKS if check.name == "image"]
    rounds = -(-len(CONFIGS) // engine.AT_ONCE)
    assert check.limit_seconds > rounds * engine.SMOKE_SECONDS


@pytest.mark.parametrize("error", [ReadTimeout, RequestsConnectionError])
def test_a_stage_that_starts_too_late_is_reported_as_such(error: type[Exception]) -> None:
    """requests says either, by whether the engine had begun to answer."""

    class Silent:
        def wait(self, timeout: int) -> None:
            raise error(f"read timed out after {timeout} s")

    with pytest.raises(InfrastructureError, match="image a: stage b did not start within 60 s"):
        engine._end_of(Silent(), "image a: stage b")
