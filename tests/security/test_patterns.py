"""No regular expression of the project takes more than linear time, whatever the text."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from nltk.tokenize import punkt

from flows.backends.container.client import CORRECT
from stages.runtime.unit_shares import FILE_OF_UNIT
from tests.security.patterns import FLOORS, Found, Text, attacks, patterns
from trainyard.collection.sources.wikitext import CLOSING, PREFIXES, simple_dropped
from trainyard.collection.words import word_pattern
from trainyard.conversion.megatron.names import OF_ENCODER
from trainyard.tokenizers.fast.seams import letter_seam, word_seam

pytestmark = pytest.mark.slow

LENGTH = 2**11
SOON = 0.003
"""Seconds in which LENGTH of linear work is done many times over, and quadratic work is not."""
TOO_LONG = 3.0
"""Times as long for twice the text: linear work takes 2, quadratic 4."""
ALARM_SECONDS = 10

EXEMPT = {"trainyard/artifacts/code_digest.py": "reads the sources of trainyard itself"}

ONLY = {"trainyard/yaml_loader.py": ("match",)}
"""By file: the methods by which a library uses a pattern."""

NON_WORD = punkt.PunktLanguageVars()._re_non_word_chars


@cache
def made_at_run_time() -> dict[str, list[str]]:
    """By file: the patterns that are not of constants, or some like them."""
    return {
        "flows/backends/container/client.py": [pattern for pattern, _ in CORRECT],
        "trainyard/collection/contamination/prefilter.py": ["[\u00e9\u4e2d]"],
        "trainyard/collection/rules/form.py": [r"\n{3,}"],
        "trainyard/collection/sources/wikitext.py": [
            simple_dropped(PREFIXES).pattern,
            CLOSING["ref"].pattern,
        ],
        "stages/runtime/unit_shares.py": [FILE_OF_UNIT.pattern],
        "trainyard/collection/words.py": [word_pattern().pattern],
        "trainyard/corpus/sentences.py": [rf"{NON_WORD}|\S+"],
        "trainyard/conversion/megatron/names.py": [OF_ENCODER.pattern],
        "trainyard/parallel/groups.py": [r"rank \d+ failed to load: "],
        "trainyard/tokenizers/fast/seams.py": [
            seam.pattern for seam in (letter_seam(["<a>"]), word_seam(["<a>"])) if seam
        ],
        "trainyard/tokenizers/fast/sentencepiece_engine.py": [r"<a>|<a><b>|\[x\]"],
        "trainyard/tokenizers/wordpiece.py": [r"<a>|<a><b>|\[x\]"],
    }


def samples() -> list[Found]:
    return [
        Found(f"{file}:0", pattern, 0, ("search",))
        for file, several in made_at_run_time().items()
        for pattern in several
    ]


@cache
def all_patterns() -> list[Found]:
    """Those of the sources; read when a test asks, since each worker collects this file."""
    return [
        replace(one, methods=ONLY.get(one.file, one.methods))
        for one in patterns()
        if one.file not in EXEMPT
    ]


@contextmanager
def alarm() -> Iterator[None]:
    """Ends a match that would take forever."""

    def ring(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, ALARM_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def seconds(used: Any, text: Text) -> float:
    began = time.thread_time()
    used(text)
    return time.thread_time() - began


def is_slow(used: Any, attack: tuple[str, str, str], kind: type) -> bool:
    """Whether twice the text takes more than thrice the time, again and again."""

    def text(length: int) -> Text:
        made = attack[0] + attack[1] * length + attack[2]
        return made if kind is str else made.encode()

    used(text(24))
    if seconds(used, text(LENGTH)) < SOON:
        return False
    # A busy machine may make one measurement long, and not those of four doublings.
    for _ in range(4):
        once, twice = (
            min(seconds(used, text(length)) for _ in range(2)) for length in (LENGTH, 2 * LENGTH)
        )
        if twice <= TOO_LONG * once:
            return False
    return True


def slow_attacks(found: Found) -> Iterator[tuple[str, tuple[str, str, str]]]:
    assert found.pattern is not None
    compiled = re.compile(found.pattern, found.flags)
    for attack in attacks(found.pattern, found.flags):
        for method in found.methods:
            substitutes = method in ("sub", "subn")
            empty = "" if isinstance(found.pattern, str) else b""
            used = getattr(compiled, method)
            call = (lambda text, used=used, empty=empty: used(empty, text)) if substitutes else used
            if method == "finditer":
                call = lambda text, used=used: list(used(text))  # noqa: E731
            try:
                with alarm():
                    if is_slow(call, attack, type(found.pattern)):
                        yield method, attack
            except TimeoutError:
                yield method, attack


def test_every_pattern_is_known() -> None:
    assert len(all_patterns()) > 100
    made = {one.file for one in all_patterns() if one.pattern is None}
    assert made == made_at_run_time().keys()


@pytest.mark.parametrize("floor", FLOORS)
def test_patterns_take_linear_time(floor: str) -> None:
    known = [*(one for one in all_patterns() if one.pattern), *samples()]
    attacked = {
        f"{one.where}: {one.pattern!r}": next(slow_attacks(one), None)
        for one in known
        if one.file.startswith(f"{floor}/")
    }
    assert len(attacked) > 5
    slow = {where: attack for where, attack in attacked.items() if attack}
    assert not slow


def test_a_pattern_that_takes_longer_is_found() -> None:
    assert next(slow_attacks(Found("here:1", r"\s+$", 0, ("search",))), None)
