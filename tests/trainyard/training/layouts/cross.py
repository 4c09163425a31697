"""Every cut of the small run against one process, as the table of docs/parallelism.md.

python -m tests.trainyard.training.layouts.cross --write    an hour on two cores

It ends with status 1 where a cut is further off than it may be."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from tests.trainyard.training.layouts.cases import FACTORS, Cut, all_cuts
from tests.trainyard.training.layouts.compare import (
    Distance,
    distance_to_one_process,
    tolerance_of,
)
from trainyard.testing.pool import RankPool

PAGE = Path(__file__).resolve().parents[4] / "docs" / "parallelism.md"
BEGIN = "<!-- generated: python -m tests.trainyard.training.layouts.cross --write -->"
END = "<!-- end of what is generated -->"

COLUMNS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2))
"""Pipeline ranks and chunks of each."""


class Measured(NamedTuple):
    """What came of one cut."""

    distance: Distance
    seconds: float

    def line(self, cut: Cut) -> str:
        """As it is kept."""
        return json.dumps({"cut": str(cut), "seconds": self.seconds, **asdict(self.distance)})


Results = Mapping[str, Measured]
"""By the name of the cut."""


def measure(results: dict[str, Measured]) -> Iterator[Cut]:
    """Add what is not yet in `results`, cut by cut."""
    with RankPool() as ranks:
        for cut in all_cuts():
            if str(cut) not in results:
                began = time.monotonic()
                distance = distance_to_one_process(cut, ranks)
                results[str(cut)] = Measured(distance, round(time.monotonic() - began, 1))
            yield cut


def read_results(file: Path | None) -> dict[str, Measured]:
    """What was measured before."""
    if file is None or not file.exists():
        return {}
    found = {}
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        name, seconds, where = entry.pop("cut"), entry.pop("seconds"), entry.pop("where")
        found[name] = Measured(Distance(**entry, where=tuple(where)), seconds)
    return found


# --- the table --------------------------------------------------------------------------------


def table(results: Results, date: str) -> str:
    """Rows by how matrices are cut, columns by stages; in each cell how many cuts were compared and
    the worst of them, in fp32. What was not measured is not in it."""
    cells: dict[str, dict[tuple[int, int], list[Cut]]] = defaultdict(dict)
    for cut in _measured(results):
        cells[cut.tensor].setdefault((cut.pp, cut.chunks), []).append(cut)
    heads = [f"pp{pp}" + (f" x {chunks}" if chunks > 1 else "") for pp, chunks in COLUMNS]
    lines = [
        BEGIN,
        "",
        _summary(results, date),
        "",
        "| matrices | " + " | ".join(heads) + " |",
        "| --- | " + " | ".join("---" for _ in heads) + " |",
    ]
    for tensor in FACTORS["tensor"]:
        if row := cells.get(tensor, {}):
            found = [_cell(row.get(column, []), results) for column in COLUMNS]
            lines.append(f"| {'whole' if tensor == 'one' else tensor} | {' | '.join(found)} |")
    return "\n".join([*lines, "", END])


def _measured(results: Results) -> list[Cut]:
    return [cut for cut in all_cuts() if str(cut) in results]


def _cell(cuts: list[Cut], results: Results) -> str:
    if not cuts:
        return ""
    fp32 = [results[str(cut)].distance for cut in cuts if not cut.bf16]
    worst = max((max(d.gradient, d.state) for d in fp32), default=None)
    if worst is None:
        return f"{len(cuts)}: bf16"
    return f"{len(cuts)}: {'=' if worst == 0.0 else f'{worst:.0e}'}"


def _summary(results: Results, date: str) -> str:
    def worst(kind: str, bf16: bool) -> str:
        found = [results[str(cut)].distance for cut in cuts if cut.bf16 is bf16]
        return f"{max(getattr(distance, kind) for distance in found):.0e}"

    cuts, kinds = _measured(results), ("loss", "grad_norm", "gradient", "state")
    exceeded = sum(bool(results[str(c)].distance.exceeds(tolerance_of(c))) for c in cuts)
    minutes = sum(results[str(cut)].seconds for cut in cuts) / 60
    verdict = "all within the tolerances" if not exceeded else f"{exceeded} FURTHER OFF"
    fp32, bf16 = ([worst(kind, wanted) for kind in kinds] for wanted in (False, True))
    return (
        f"{date}, torch {torch.__version__.split('+')[0]}, gloo, two cores, {minutes:.0f} minutes: "
        f"{len(cuts)} of {len(all_cuts())} cuts, {verdict}. Worst relative difference of losses, "
        "gradient norms, a gradient, a tensor of the state after five steps: "
        f"{', '.join(fp32)} in fp32 and {', '.join(bf16)} in bf16."
    )


def written(page: str, generated: str) -> str:
    """The page with the generated part replaced."""
    before, rest = page.split(BEGIN)
    return before + generated + rest.split(END)[1]


# --- the command ------------------------------------------------------------------------------


def main() -> int:
    """Measure, and put the table into the page."""
    parser = argparse.ArgumentParser(description="Compare every cut with one process.")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    parser.add_argument("--results", type=Path, help="lines of what was measured, to go on from")
    parser.add_argument("--no-more", action="store_true", help="the table of --results as they are")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, failed = read_results(options.results), 0
    cuts = iter(_measured(results)) if options.no_more else measure(results)
    for number, cut in enumerate(cuts, 1):
        found = results[str(cut)]
        exceeded = found.distance.exceeds(tolerance_of(cut))
        failed += bool(exceeded)
        print(f"{number}/{len(all_cuts())} {cut}: {'; '.join(exceeded) or 'equal'}", flush=True)
        if options.results is not None and not options.no_more:
            lines = [results[str(c)].line(c) for c in all_cuts() if str(c) in results]
            options.results.write_text("\n".join(lines) + "\n")
    generated = table(results, datetime.now(UTC).date().isoformat())
    print(generated)
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), generated))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
