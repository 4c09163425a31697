"""Shares as processes of this machine: a corpus that several make has the bytes of one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yard.yard import Yard, write_corpus
from trainyard.artifacts.manifest import read_manifest

pytestmark = [pytest.mark.yard, pytest.mark.timeout(400)]

RECIPE = """
corpus = ["{folder}/in/*.jsonl"]

[clean]
rules = ["min_chars:limit=200"]
workers = 1

[dedup]
workers = 1
"""

PROFILE = """
block = "process"
shares_at_once = 2

[shares]
clean = 2
dedup = 3
"""


def test_processes_make_in_shares_the_corpus_of_one_run(
    tmp_path: Path, prefect_api: dict[str, str]
) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    (tmp_path / "in").mkdir()
    write_corpus(tmp_path / "in" / "a.jsonl", 200, seed=1)
    profile = tmp_path / "here.toml"
    profile.write_text(PROFILE)
    recipe = yard.recipe(RECIPE.format(folder=tmp_path))
    digests = []
    for place, more in (("shared", ("--profile", str(profile))), ("alone", ())):
        folder = tmp_path / place
        done = yard.run("-m", "flows.collect_corpus", recipe, "--root", str(folder), *more)
        assert done.status == 0, done.err
        names = {"clean-a", "dedup"}
        if more:
            names |= {f"{name}-shares" for name in names}
        assert done.states() == dict.fromkeys({*names, "datasheet", "corpus"}, "done")
        (version,) = (folder / "tiny" / "versions").iterdir()
        found = read_manifest(f"{version}/dedup/manifest.json")
        assert found is not None
        digests.append(found[0].output_digest)
        assert not list(folder.rglob("*.shares"))
    assert digests[0] == digests[1]
