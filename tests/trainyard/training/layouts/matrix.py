"""The table of docs/models.md: for each family the layouts that tests compare with one process.

    python -m tests.trainyard.training.layouts.matrix --write

Made of the cases of the tests beside this file: a cell is a dash until a test has such a case."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

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

PAGE = Path(__file__).resolve().parents[4] / "docs" / "models.md"
BEGIN = "<!-- generated: python -m tests.trainyard.training.layouts.matrix --write -->"
END = "<!-- end of what is generated -->"

FAMILIES = {
    "GPT": ("gpt", "llama"),
    "GPT, experts": ("mixtral", "deepseek moe", "gpt moe", "gpt-oss"),
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
TESTS = (
    *(test_bert, test_fully_sharded, test_latent, test_mamba, test_moe, test_mtp, test_retro),
    test_t5,
)


def table(cuts: Iterable[Cut]) -> str:
    """The table, in Markdown."""
    tested = {(cut.kind, name) for cut in cuts for name, has in COLUMNS.items() if has(cut)}
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|{' --- |' * (1 + len(COLUMNS))}"]
    for family, kinds in FAMILIES.items():
        cells = ["yes" if any((k, n) in tested for k in kinds) else "-" for n in COLUMNS]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def all_tested() -> list[Cut]:
    """Every case of these tests."""
    return [*all_cuts(), *(cut for module in TESTS for cut in module.CUTS)]


def written(page: str) -> str:
    """The page with the table as it is now."""
    return replaced(page, BEGIN, table(all_tested()))


def replaced(page: str, begin: str, made: str) -> str:
    """The page with other text between the marks of one table."""
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{made}\n\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("give --write")
    PAGE.write_text(written(PAGE.read_text()))
