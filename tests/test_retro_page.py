"""The commands of docs/retro.md in their order, from raw text to an evaluated Retro, as they stand
but for sizes: a small corpus and small models."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("faiss")

from tests.test_docs import ROOT, code_lines, fenced
from trainyard.retrieval.neighbors import Neighbors

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

PAGE = "docs/retro.md"
SMALL = {
    "--num-layers": "6",  # the first number with a layer of cross attention by default
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "256",
    "--global-batch-size": "8",
    "--train-iters": "2",
    "--train-samples": "16",
    "--eval-interval": "2",
    "--eval-iters": "1",
    "--out-seq-length": "4",
    "--index-size": "5000",
    "--world-size": "2",
    "--retro-index-ntrain": "300",
    "--retro-gpt-seq-length": "256",
    "--retro-gpt-global-batch-size": "8",
    "--retro-gpt-train-samples": "16",
    "--retro-gpt-eval-interval": "2",
    "--retro-gpt-eval-iters": "1",
}
NUM_DOCUMENTS = {"wiki": 120, "books": 80, "news": 20}
MEASURED = "small/100000"
LONG_ENOUGH = range(4000, 6000)
"""Characters of a document: 2 % of the documents have a sample for validation."""
RANK = "$SLURM_ARRAY_TASK_ID"
MADE = ("db", "embeddings", "index_empty", "index", "query")
"""Parts of the project that one command makes, and the stages by themselves."""


class Reader:
    """Someone who types the commands of the page in a folder."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "NLTK_DATA": str(shared / "data/nltk_data"),
        }

    def types(self, command: str, cwd: Path | None = None, typed: str = "") -> str:
        """What a command prints; it must succeed."""
        words = shlex.split(command.removeprefix(".venv/bin/python"))
        return self.runs([sys.executable, *smaller(words)], cwd, typed)

    def runs(self, words: list[str], cwd: Path | None = None, typed: str = "") -> str:
        """What a program prints; it must succeed."""
        done = subprocess.run(
            words,
            cwd=cwd or self.folder,
            env=self._environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=600,
        )
        printed = done.stdout + done.stderr
        assert done.returncode == 0, f"{shlex.join(words)}\n{printed[-5000:]}"
        return printed

    def puts_aside(self, name: str, *parts: str) -> Path:
        """Move parts of the project to a folder beside it, so that they are made again."""
        aside = self.folder / name
        aside.mkdir()
        for part in parts:
            (self.folder / "retro" / part).rename(aside / part)
        return aside


def smaller(words: list[str]) -> list[str]:
    """With the sizes of `SMALL`; one batch of validation too where the page leaves the default."""
    found = [SMALL.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    if "--train-iters" in words and "--eval-iters" not in words:
        found += ["--eval-iters", SMALL["--eval-iters"]]
    return found


def commands() -> dict[str, list[str]]:
    """The commands of each section that has some, in the order of the page."""
    found: dict[str, list[str]] = {}
    text = re.split(r"^## (.*)$", (ROOT / PAGE).read_text(), flags=re.MULTILINE)
    lines = [line.strip() for line in code_lines(PAGE)]
    typed = [line for line in lines if line.startswith(".venv/bin/python -m stages.")]
    for title, section in zip(text[1::2], text[2::2], strict=True):
        number = len(re.findall(r"^ *\.venv/bin/python -m stages\.", section, re.MULTILINE))
        if number:
            found[title], typed = typed[:number], typed[number:]
    assert not typed
    return found


# --- what the reader brings along ---------------------------------------------------------------


def write_inputs(folder: Path, shared: Path) -> None:
    """Documents, vocabularies, a held-out text, and questions with contexts."""
    with (shared / "data/corpora/corpus_en.jsonl").open() as corpus:
        texts = (line for line in corpus if len(line) in LONG_ENOUGH)
        for name, number in NUM_DOCUMENTS.items():
            (folder / f"{name}.jsonl").write_text("".join(islice(texts, number)))
        (folder / "heldout.txt").write_text(json.loads(next(texts))["text"])
    vocabularies = shared / "data/vocab"
    for name, file in {
        "gpt2/vocab.json": "gpt2/vocab.json",
        "gpt2/merges.txt": "gpt2/merges.txt",
        "bert/vocab.txt": "bert/bert-base-uncased-vocab.txt",
    }.items():
        (folder / "retro" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(vocabularies / file, folder / "retro" / name)
    asked = [
        {
            "question": f"What is number {number}?",
            "answers": [f"the number {number}"],
            "ctxs": [{"title": "numbers", "text": f"It is the number {number}."}] * 5,
        }
        for number in range(16)
    ]
    for name in ("nq", "squad1.1"):
        (folder / "instructions" / name).mkdir(parents=True)
        for file in (f"{name}_QA_train", f"{name}_QA_dev", "test"):
            (folder / "instructions" / name / f"{file}.json").write_text(json.dumps(asked))


# --- the page -----------------------------------------------------------------------------------


def test_the_commands_of_the_page_lead_from_raw_text_to_an_evaluated_retro(
    tmp_path: Path, shared: Path
) -> None:
    write_inputs(tmp_path, shared)
    reader, page = Reader(tmp_path, shared), commands()
    *_, whole = to_neighbours = page.pop("From raw text")
    for command in to_neighbours:
        reader.types(command)
    by_one_command = reader.puts_aside("by_one_command", *MADE)
    for title in ("The chunk database", "The embeddings", "The index", "Neighbours"):
        for command in page.pop(title):
            reader.types(command)
    for split in ("train", "valid"):
        check_tables(tmp_path / "retro/query" / split, by_one_command / "query" / split)
    reader.runs([sys.executable, "-c", fenced(PAGE, "python")[0]])  # "Reading it"
    for command in page.pop("New documents"):
        reader.types(command)
    check_growth(tmp_path / "retro")
    alone = reader.puts_aside("alone", "index")
    share, join = page.pop("Shards")
    for rank in range(int(SMALL["--world-size"])):
        reader.types(share.replace(RANK, str(rank)))
    reader.types(join)
    file = "added.faissindex"
    assert (tmp_path / "retro/index" / file).read_bytes() == (alone / "index" / file).read_bytes()

    take_over, *exports = page.pop("Projects of Megatron-LM")
    for command in exports:
        reader.types(command)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copytree(tmp_path / "for-megatron", other / "old")
    reader.types(take_over, other)
    for split in ("train", "valid"):
        check_tables(other / "retro/query" / split, by_one_command / "query" / split)
    (report,) = page.pop("The run card")
    reader.types(report)
    card = (tmp_path / "retro/card.html").read_text()
    assert "neighbour" in card
    measure(reader, whole)
    (plan,) = page.pop("What it takes: plan")
    said = reader.types(plan.replace(f"{MEASURED} small/200000", MEASURED))
    assert re.search(r"^faiss_query +[\d,]+\.\d h ", said, re.MULTILINE)

    for title in ("Training", "Instruction tuning"):
        for command in page.pop(title):
            reader.types(command)
    for run in ("retro-heldout", "nq"):
        assert (tmp_path / "runs" / run / "manifest.json").exists()
    (explore,) = page.pop("Exploring")
    calls = [line.split("> ", 1)[1] for line in code_lines(PAGE) if "retro> " in line]
    assert len(calls) == 2
    assert "neighbor" in reader.types(explore, typed="\n".join(calls))
    assert not page, "a section that is not run"


def measure(reader: Reader, command: str) -> None:
    """Build `MEASURED`, a small project with an index of lists."""
    for part in ("data", "gpt2", "bert"):
        shutil.copytree(reader.folder / "retro" / part, reader.folder / MEASURED / part)
    other = command.replace("--retro-project-dir retro", f"--retro-project-dir {MEASURED}")
    reader.types(f"{other} --retro-index-str IVF7,SQ8")


def check_tables(table: Path, wanted: Path) -> None:
    """Two tables have the same neighbours."""
    one, other = Neighbors(str(table)), Neighbors(str(wanted))
    assert len(one) == len(other) > 0
    np.testing.assert_array_equal(one.rows(range(len(one))), other.rows(range(len(other))))


def check_growth(project: Path) -> None:
    """The grown index has the old vectors and more."""
    old, new = (
        json.loads((project / name / "index.json").read_text())["num_vectors"]
        for name in ("index", "index-2")
    )
    assert 0 < old < new
