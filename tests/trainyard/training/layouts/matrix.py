"""The table of docs/models.md: for each family the layouts that tests compare with one process.

    python -m tests.trainyard.training.layouts.matrix --write

Made of what was recorded of the cases of the tests beside this file (tests/records.py): a cell is a
dash until a test has such a case."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.records import Case, Records, cell, recorded, summary
from tests.trainyard.training.layouts import (
    test_bert,
    test_fully_sharded,
    test_latent,
    test_mamba,
    test_moe,
    test_mtp,
    test_retro,
    test_t5,
)
from tests.trainyard.training.layouts.cases import Cut, all_cuts

HERE = "tests/trainyard/training/layouts"
PAGE = Path(__file__).resolve().parents[4] / "docs" / "models.md"
BEGIN = "<!-- generated: python -m tests.trainyard.training.layouts.matrix --write -->"
END = "<!-- end of what is generated -->"

FAMILIES = {
    "GPT": ("gpt", "llama"),
    "GPT, experts": ("mixtral", "deepseek moe", "llama 4", "gpt moe", "gpt-oss"),
    "GPT, latent attention": (
        *("latent", "latent queries of tokens", "deepseek v3", "predicting deepseek"),
    ),
    "GPT, multi-token prediction": ("predicting", "predicting deepseek"),
    "BERT": ("bert",),
    "T5": ("t5", "google t5"),
    "Retro": ("retro",),
    "Mamba-2, hybrids": ("mamba", "hybrid", "hybrid moe"),
}
"""The kinds of models of the tests, by rows of the table; a kind may be in several."""

COLUMNS: dict[str, Callable[[Cut], bool]] = {
    "tensor": lambda cut: cut.tp > 1,
    "sequence": lambda cut: "sp" in cut.tensor,
    "pipeline": lambda cut: cut.pp > 1,
    "interleaved": lambda cut: cut.chunks > 1,
    "context": lambda cut: cut.cp > 1,
    "expert": lambda cut: cut.ep > 1,
    "optimizer sharded": lambda cut: cut.reduction.startswith("zero"),
    "gradients, weights sharded": lambda cut: cut.reduction.startswith("optim_grads"),
    "recomputation": lambda cut: cut.recompute != "none",
    "bf16": lambda cut: cut.bf16,
}
TESTS: tuple[tuple[list[Cut], Callable[..., None]], ...] = (
    (test_bert.CUTS, test_bert.test_a_bert_over_ranks_equals_one_process),
    (test_fully_sharded.CUTS, test_fully_sharded.test_every_way_of_sharding_equals_one_process),
    (test_latent.CUTS, test_latent.test_latents_over_ranks_equal_one_process),
    (test_mamba.CUTS, test_mamba.test_a_hybrid_over_ranks_equals_one_process),
    (test_moe.CUTS, test_moe.test_experts_over_ranks_equal_one_process),
    (test_mtp.CUTS, test_mtp.test_further_tokens_over_ranks_equal_one_process),
    (test_retro.CUTS, test_retro.test_a_retro_over_ranks_equals_one_process),
    (test_t5.CUTS, test_t5.test_a_t5_over_ranks_equals_one_process),
)
EVERY_LAYOUT = f"{HERE}/test_equivalence.py::test_every_layout_equals_one_process"
"""Importing it takes seconds."""

Tested = Sequence[tuple[Cut, Case]]
"""Cuts, each with its case as pytest calls it."""


def all_tested() -> Tested:
    """Every case of these tests."""
    of_tests = [
        (cut, (f"{test.__module__.replace('.', '/')}.py::{test.__name__}", str(cut)))
        for cuts, test in TESTS
        for cut in cuts
    ]
    return [*((cut, (EVERY_LAYOUT, str(cut))) for cut in all_cuts()), *of_tests]


def table(tested: Tested, records: Records) -> str:
    """The table, in Markdown."""
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|{' --- |' * (1 + len(COLUMNS))}"]
    for family, kinds in FAMILIES.items():
        of_family = [(cut, case) for cut, case in tested if cut.kind in kinds]
        cells = [
            cell([case for cut, case in of_family if has(cut)], records) for has in COLUMNS.values()
        ]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", summary([case for _, case in tested], records)])


def written(page: str, records: Records) -> str:
    """The page with the table as it is now."""
    return replaced(page, BEGIN, table(all_tested(), records))


def replaced(page: str, begin: str, made: str) -> str:
    """The page with other text between the marks of one table."""
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{made}\n\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("give --write")
    PAGE.write_text(written(PAGE.read_text(), recorded()))
