"""A Retro project, killed between and within its stages, ends as an undisturbed one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("faiss")

from tests.stages.test_retro_preprocess import options
from tests.trainyard.embedding.encoders import make
from tests.trainyard.retrieval.corpora import write_corpus, write_vocabulary
from tests.trainyard.retrieval.samples import sentences
from trainyard.artifacts.manifest import read_manifest

pytestmark = [pytest.mark.kill, pytest.mark.timeout(1500)]

PARTS = ("db", "embeddings/sampled", "embeddings/train", "index_empty", "index")
PARTS += ("embeddings/samples_train", "query/train", "embeddings/samples_valid", "query/valid")

KILLS = ("1 of 9", "2 of 9", "retro_embed: done", "5 of 9", "faiss_add: recall", "9 of 9")
"""Words of the log after which the program is killed."""


def prepare(folder: Path) -> list[str]:
    """Token files and an encoder; the command line."""
    (folder / "data").mkdir(parents=True)
    for seed, name in enumerate(("en", "de")):
        write_corpus(folder / "data" / name, sentences(60, seed))
    write_vocabulary(folder)
    make(folder / "bert")
    words = [sys.executable, "-m", "stages.retro_preprocess"]
    for name, value in options(folder).items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def kill_after(command: list[str], words: str) -> None:
    """Run until the log has these words, then SIGKILL; its stage ends with it."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        seen = any(words in line for line in process.stderr)
        process.kill()
    assert seen, f"it ended without {words!r}"


def digests(folder: Path) -> dict[str, str]:
    found = {part: read_manifest(f"{folder / part}/manifest.json") for part in PARTS}
    return {part: one[0].output_digest for part, one in found.items() if one is not None}


def test_a_project_survives_kills(tmp_path: Path) -> None:
    whole = prepare(tmp_path / "whole")
    subprocess.run(whole, check=True)
    wanted = digests(tmp_path / "whole")
    assert list(wanted) == list(PARTS)
    command = prepare(tmp_path / "killed")
    for words in KILLS:
        kill_after(command, words)
    subprocess.run(command, check=True)
    assert digests(tmp_path / "killed") == wanted
    assert not list((tmp_path / "killed").rglob(".claim.json"))
