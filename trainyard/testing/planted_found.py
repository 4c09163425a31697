"""Compares what was planted in a generated dump with what the stages removed.

    python -m trainyard.testing.planted_found PLANTED.json yard/corpus_quickstart/current.json

PLANTED.json is what `trainyard.testing.wiki_dump` prints. Prints a table and the link to the
datasheet; exit status 1 where they differ."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainyard.artifacts import store

COUNTED = (
    ("redirects", "collect", "redirect"),
    ("disambiguations", "collect", "disambiguation"),
    ("others", "collect", "namespace"),
    ("near_duplicates", "dedup", "near"),
)
"""(planted, stage, rule) of what a rule drops."""


def compared(planted: Mapping[str, int], sheet: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """(what, planted, found). sheet: the data of the datasheet."""
    steps = {step["stage"]: step for step in sheet["steps"]}
    rows = [
        (what.replace("_", " "), planted[what], steps[stage]["reasons"][rule]["dropped"])
        for what, stage, rule in COUNTED
    ]
    tasks = steps["decontaminate"]["tasks"].values()
    leaked = sum(task["documents"] for task in tasks)
    rows.append(("leaked evaluation items", planted["leaked"], leaked))
    return [*rows, ("articles", planted["articles"], steps["collect"]["kept"])]


def main() -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description="Compare what was planted with what was found.")
    parser.add_argument("planted", type=Path, help="what wiki_dump printed")
    parser.add_argument("pointer", help="current.json of the corpus")
    given = parser.parse_args()
    prefix = store.read_json(given.pointer)["datasheet"]
    planted, sheet = store.read_json(str(given.planted)), store.read_json(f"{prefix}.json")
    rows = compared(planted, sheet)
    print(f"{'':<26}{'planted':>8}{'found':>8}")
    for what, before, found in rows:
        print(f"{what:<26}{before:>8}{found:>8}")
    print(f"datasheet: {prefix}.html")
    return int(any(before != found for _, before, found in rows))


if __name__ == "__main__":
    sys.exit(main())
