"""A merge of pairs that are copied by direct I/O, or by the store itself, killed anywhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.kill.yard import Yard
from trainyard.artifacts import store
from trainyard.artifacts.leftovers import uploads
from trainyard.artifacts.urls import join
from trainyard.corpus.indexed import IndexedDataset, IndexedWriter
from trainyard.testing.kill import Zygote, check_kill_anywhere

pytestmark = [pytest.mark.kill, pytest.mark.timeout(900)]

TOKENS = 3_300_000
"""More than the least part of an upload, less than two; odd against every block."""


def put_parts(folder: str) -> None:
    for number in range(2):
        prefix = join(folder, f"part-{number}")
        tokens = np.random.default_rng(number).integers(0, 60_000, TOKENS + number, np.uint16)
        with (
            store.open_output(prefix + ".bin") as out,
            store.open_output(prefix + ".idx") as idx,
        ):
            writer = IndexedWriter(out, np.uint16)
            writer.add_flat(tokens, [len(tokens) - 10, 10])
            writer.write_index(idx)


@pytest.mark.parametrize(
    ("kind", "flags"), [("file", []), ("s3", []), ("file", ["--virtual"]), ("s3", ["--virtual"])]
)
def test_a_merge_of_large_pairs_survives_a_kill_anywhere(
    kind: str,
    flags: list[str],
    zygote: Zygote,
    yard: Yard,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", yard.at("cache"))
    root = str(tmp_path) if kind == "file" else str(request.getfixturevalue("s3_url"))
    put_parts(join(root, "parts"))
    if kind == "file":
        for path in (tmp_path / "parts").iterdir():
            os.utime(path, (1e9, 1e9))  # settled: their digests are remembered

    check_kill_anywhere(
        zygote,
        "stages.merge",
        lambda name: [
            *("--input", join(root, "parts"), "--output-prefix", join(root, name, "out")),
            *flags,
        ],
        lambda name: join(root, name, "out.manifest.json"),
        10,
    )
    whole = IndexedDataset(join(root, "undisturbed", "out"))
    assert int(whole.sequence_lengths.sum()) == 2 * TOKENS + 1
    if kind == "file":
        assert [path for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


SHARE = ("--rank", "0", "--world-size", "2")


@pytest.mark.parametrize("place", ["file", "s3"])
@pytest.mark.parametrize("kind", ["share", "join"])
def test_a_merge_in_shares_survives_a_kill_anywhere(
    kind: str,
    place: str,
    zygote: Zygote,
    yard: Yard,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", yard.at("cache"))
    root = str(tmp_path) if place == "file" else str(request.getfixturevalue("s3_url"))
    put_parts(join(root, "parts"))
    if place == "file":
        for path in (tmp_path / "parts").iterdir():
            os.utime(path, (1e9, 1e9))  # settled: their digests are remembered
    made: set[str] = set()
    shares = tmp_path_factory.mktemp("made") / "shares"
    """Copied for each run of the join, which begins where both shares are made."""

    def arguments(name: str) -> list[str]:
        line = ["--input", join(root, "parts"), "--output-prefix", join(root, name, "out")]
        if kind == "share":
            return [*line, *SHARE]
        if name not in made and made and place == "file":
            shutil.copytree(shares, tmp_path / name)
        elif name not in made:
            make_shares(line)
        if not made and place == "file":
            shutil.copytree(tmp_path / name, shares)
        made.add(name)
        return [*line, *SHARE[2:]]

    def make_shares(line: list[str]) -> None:
        for rank in "01":
            status, _, log = zygote.run("stages.merge", [*line, "--rank", rank, *SHARE[2:]])
            assert status == 0, log

    def manifest(name: str) -> str:
        ending = "out.shares/00000-of-00002" if kind == "share" else "out"
        return join(root, name, f"{ending}.manifest.json")

    points = 12 if place == "file" else 6
    check_kill_anywhere(zygote, "stages.merge", arguments, manifest, points)
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".")] == []
    if kind == "join":
        assert not [name for name in store.list_files(root) if ".shares/" in name]
        assert uploads(root) == []
        whole = IndexedDataset(join(root, "undisturbed", "out"))
        assert int(whole.sequence_lengths.sum()) == 2 * TOKENS + 1
