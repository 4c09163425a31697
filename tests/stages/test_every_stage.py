"""What every stage owes whoever types its name: help, refusals in words, no work first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stages.directly import Done, run_program
from trainyard.config_text import parse_document

ROOT = Path(__file__).resolve().parents[2]
STAGES = sorted(path.parent.name for path in ROOT.glob("stages/*/__main__.py"))

MODEL = ("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2")
MODEL += ("--seq-length", "32", "--micro-batch-size", "2")

NOWHERE = "/nowhere/at/all"

RUN = ("--seq-length", "32", "--train-iters", "2", "--global-batch-size", "4")

ENOUGH = {
    "benchmark": ("--load", NOWHERE, "--prompts", "a"),
    "blame": (*RUN, "--micro-batch-size", "2", "--data-path", NOWHERE, "--step", "1"),
    "certify": (NOWHERE,),
    "clean": ("--input", NOWHERE, "--preset", "fineweb"),
    "collect": (),
    "datasheet": ("--documents", NOWHERE),
    "decontaminate": ("--input", NOWHERE, "--tasks", "squad", "--task-data", NOWHERE),
    "dedup": ("--input", NOWHERE),
    "evaluate": ("--task", "WIKITEXT103", "--load", NOWHERE, "--valid-data", NOWHERE),
    "faiss_add": ("--index", NOWHERE, "--embeddings", NOWHERE),
    "faiss_query": (
        *(*RUN, "--data-path", NOWHERE, "--index", NOWHERE, "--embeddings", NOWHERE),
        *("--retro-db", NOWHERE, "--retro-gpt-chunk-length", "16"),
    ),
    "faiss_train": ("--embeddings", NOWHERE),
    "generate": ("--load", NOWHERE, "--prompts", "a"),
    "index": (*RUN, "--data-path", NOWHERE),
    "inspect": (NOWHERE,),
    "merge": ("--input", NOWHERE),
    "mix": ("--input", NOWHERE, "--sources", "a"),
    "parity": ("--load", NOWHERE),
    "plan": (*MODEL, "--vocab-size", "300"),
    "pretrain": (*MODEL, "--data-path", NOWHERE, "--train-iters", "2", "--lr", "0.001"),
    "report": ("--checkpoint", NOWHERE),
    "reshard": ("--load-dir", NOWHERE),
    "retro_db": (
        *("--data-path", NOWHERE, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"),
        *("--retro-bert-tokenizer-type", "BertWordPieceCase", "--retro-bert-vocab-file", NOWHERE),
        *("--retro-index-ntrain", "9"),
    ),
    "retro_embed": (
        *("--retro-db", NOWHERE, "--data-path", NOWHERE, "--load", NOWHERE),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "9"),
    ),
    "retro_explore": (NOWHERE,),
    "retro_export": ("--retro-project-dir", NOWHERE),
    "retro_import": ("--retro-project-dir", NOWHERE),
    "retro_preprocess": (
        *("--retro-gpt-data-path", NOWHERE, "--retro-gpt-train-samples", "8", "--load", NOWHERE),
        *("--retro-gpt-eval-interval", "2", "--retro-gpt-eval-iters", "1"),
        *("--retro-gpt-seq-length", "64", "--retro-gpt-global-batch-size", "4"),
        *("--retro-gpt-tokenizer-type", "ByteLevelTokenizer", "--retro-index-ntrain", "9"),
        *("--retro-bert-tokenizer-type", "BertWordPieceCase", "--retro-bert-vocab-file", NOWHERE),
    ),
    "quantize": ("--load-dir", NOWHERE),
    "score": ("--input", NOWHERE, "--classifier", "annotated"),
    "serve": ("--load", NOWHERE),
    "tokenize": ("--input", NOWHERE, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"),
    "train_tokenizer": ("--input", NOWHERE),
    "verify": (NOWHERE,),
}
"""Flags that make each stage's options complete; inputs that do not exist where it has inputs."""

INTO = {"pretrain": "--save", "quantize": "--save-dir", "reshard": "--save-dir"}
INTO["retro_preprocess"] = "--retro-project-dir"
INTO |= dict.fromkeys(("blame", "certify", "inspect", "retro_explore", "serve", "verify"), "")
INTO |= dict.fromkeys(("datasheet", "tokenize", "merge", "report"), "--output-prefix")


def arguments(stage: str, tmp_path: Path) -> list[str]:
    into = INTO.get(stage, "--output-dir")
    more = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"] if stage == "pretrain" else []
    return [*ENOUGH[stage], *more, *([into, str(tmp_path / "out")] if into else [])]


def run(stage: str, *words: str, expect: int | None = None) -> Done:
    return run_program(f"stages.{stage}", *words, expect=expect)


def test_the_table_names_every_stage() -> None:
    assert sorted(ENOUGH) == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_a_wrong_flag_is_refused(stage: str, tmp_path: Path) -> None:
    done = run(stage, *arguments(stage, tmp_path), "--no-such-flag", "1", expect=2)
    assert "--no-such-flag" in done.out + done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", [name for name in STAGES if NOWHERE in ENOUGH[name]])
def test_a_missing_input_is_named_before_any_work(stage: str, tmp_path: Path) -> None:
    done = run(stage, *arguments(stage, tmp_path))
    assert done.status in (1, 2), done.err
    assert NOWHERE in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_what_dry_run_prints_is_read_back(stage: str, tmp_path: Path) -> None:
    done = run(stage, *arguments(stage, tmp_path), "--dry-run", expect=0)
    parse_document(done.out, ".toml", stage)
    document = tmp_path / "options.toml"
    document.write_text(done.out)
    again = run(stage, "--config", str(document), "--dry-run")
    assert again.out == done.out
    run(stage, "--config", str(document), "--config", str(tmp_path / "none.toml"), expect=2)
