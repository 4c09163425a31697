"""Compares two evaluations of the same data by the same protocol.

    python -m stages.compare A B

A and B are folders that stages.evaluate wrote with --output-dir. Prints every figure of both, the
difference with its interval of 95 %, and the p-value of a paired test. Evaluations by different
protocols, or of different data, are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from stages.runtime.failure import report_failure
from trainyard import logging as our_logging
from trainyard.arguments import Parser
from trainyard.artifacts.digest import SHORT
from trainyard.errors import TrainyardError
from trainyard.evaluation.compare import (
    Difference,
    check_comparable,
    compare,
    left_out,
    same_tokens,
)
from trainyard.evaluation.passport import ScoredSet, read_results
from trainyard.logging import one_line

SIGNIFICANT = 0.05
ROUNDING = 1e-6
"""Relative: smaller differences come from batches and ranks, however regular they are."""


def main(words: Sequence[str]) -> int:
    """Print the comparison. Returns the exit status."""
    parser = Parser(prog="python -m stages.compare", description=__doc__.split("\n")[0])
    parser.add_argument("a", help="folder of an evaluation")
    parser.add_argument("b", help="folder of another one")
    options = parser.parse_args(list(words))
    our_logging.configure()
    try:
        for line in comparison(options.a, options.b):
            print(one_line(line))
    except TrainyardError as error:
        return report_failure("compare", error, debug=False)
    return 0


def comparison(a: str, b: str) -> list[str]:
    """The lines about all data sets. Raises before the first one for a pair that is not
    comparable."""
    sets = read_results(b)
    pairs = matched(read_results(a), sets)
    for one, other in pairs:
        check_comparable(one, other)
    lines = [line for pair in pairs for line in _lines(*pair)]
    compared = [other for _, other in pairs]
    alone = [one.name for one in sets if one not in compared]
    return [*lines, *([f"not in A, so not compared: {', '.join(alone)}"] if alone else [])]


def matched(a: Sequence[ScoredSet], b: Sequence[ScoredSet]) -> list[tuple[ScoredSet, ScoredSet]]:
    """Each data set of A with that of B of the same data; without one, with that of its place, so
    that the refusal says what differs."""
    by_data = {one.passport["data"]["digest"]: one for one in b}
    return [
        (one, by_data.get(one.passport["data"]["digest"], b[min(place, len(b) - 1)]))
        for place, one in enumerate(a)
    ]


def _lines(a: ScoredSet, b: ScoredSet) -> Iterator[str]:
    protocol = a.passport["protocol"]
    yield f"{a.name}: {protocol.get('name')} (protocol {protocol['digest']})"
    for part in ("checkpoint", "tokenizer", "code"):
        ours, theirs = (_digest(one, part) for one in (a, b))
        if ours != theirs:
            yield f"  {part} differs: {ours} and {theirs}"
    differences = compare(a, b)
    width = max((len(one.name) for one in differences), default=0)
    for one in differences:
        yield f"  {one.name:{width}}  A {one.a:.6g}  B {one.b:.6g}  {_verdict(one)}"
    if not same_tokens(a, b) and (names := left_out(a, b)):
        yield f"  not compared, as the tokenizers differ: {', '.join(names)}"


def _digest(scored: ScoredSet, part: str) -> str:
    """Of a part of the passport, shortened."""
    found = scored.passport.get(part)
    return str(found.get("digest") if isinstance(found, dict) else found)[:SHORT]


def _verdict(one: Difference) -> str:
    is_better = (one.difference > 0) == (one.better == "higher")
    says = f"B is {'better' if is_better else 'worse'}"
    if abs(one.difference) <= ROUNDING * max(abs(one.a), abs(one.b)):
        says = "equal, up to rounding"
    elif one.p_value >= SIGNIFICANT:
        says = "no difference that these examples show"
    return (
        f"B - A {one.difference:+.4g} [{one.low:+.4g}, {one.high:+.4g}]  "
        f"p {one.p_value:.3g} ({one.test}; {one.count:,} examples): {says}"
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
