"""A Retro project, killed between and within its stages, ends as an undisturbed one; so do the
shares of its database and their join."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("faiss")

from tests.kill.yard import Yard
from tests.stages.test_retro_preprocess import options, words_of
from tests.trainyard.embedding.encoders import make
from tests.trainyard.retrieval.corpora import write_corpus, write_vocabulary
from tests.trainyard.retrieval.samples import sentences
from trainyard.artifacts.manifest import read_manifest
from trainyard.testing.kill import Zygote, check_kill_anywhere

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
    return [sys.executable, "-m", "stages.retro_preprocess", *words_of(options(folder))]


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


SHARES = ("--world-size", "2")


@pytest.mark.parametrize("kind", ["share", "join"])
def test_a_database_in_shares_survives_a_kill_anywhere(
    kind: str,
    zygote: Zygote,
    yard: Yard,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", yard.at("cache"))
    made = tmp_path_factory.mktemp("made") / "out"
    if kind == "join":
        for rank in "01":
            line = [*yard.arguments("retro_db", str(made)), "--rank", rank, *SHARES]
            status, _, log = zygote.run("stages.retro_db", line)
            assert status == 0, log
    begun: set[str] = set()

    def arguments(name: str) -> list[str]:
        out = tmp_path / name / "out"
        line = [*yard.arguments("retro_db", str(out)), *SHARES]
        if kind == "share":
            return [*line, "--rank", "1"]
        if name not in begun:  # each undisturbed or killed run joins shares of its own
            shutil.copytree(f"{made}.shares", f"{out}.shares")
        begun.add(name)
        return line

    def manifest(name: str) -> str:
        ending = "out.shares/00001-of-00002" if kind == "share" else "out"
        return str(tmp_path / name / ending / "manifest.json")

    check_kill_anywhere(zygote, "stages.retro_db", arguments, manifest, 10)
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".")] == []
    if kind == "join":
        assert not list(tmp_path.rglob("*.shares"))
        found = read_manifest(str(tmp_path / "undisturbed" / "out" / "manifest.json"))
        whole = read_manifest(yard.at("retro-db", "manifest.json"))
        assert found is not None
        assert whole is not None
        assert found[0].output_digest == whole[0].output_digest
