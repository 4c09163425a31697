"""Versions of an index that grows: of older ones, the newest needs the embeddings alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.gc.policy import DAY, Policy
from flows.gc.sweep import sweep
from flows.recipes.refresh_retro import RetroVersion
from tests.flows.gc.yards import OTHERS, claim, make_older
from trainyard.artifacts import store
from trainyard.artifacts.manifest import InputRecord, Manifest, publish
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join

SCRATCH = "scratch"
"""Of other runs on this machine."""


def make(folder: str, stage: str, inputs: dict[str, tuple[str, ...]]) -> None:
    """A finished output of a stage."""
    output = Output.directory(folder)
    record = store.write_bytes(output.file_url("data"), folder.encode(), "data")
    named = {name: InputRecord(urls, f"digest of {urls[0]}") for name, urls in inputs.items()}
    publish(output.manifest_url, Manifest(stage=stage, files=(record,), inputs=named), None)


class GrowingIndex:
    """An index as corpus-refresh makes it."""

    def __init__(self, root: str) -> None:
        self.retro, self.number = join(root, "web/retro"), 0
        self.current: RetroVersion | None = None

    def grow(self, *, anew: bool = False, is_published: bool = True) -> str:
        """The next version; its name."""
        self.number += 1
        name = f"{self.number:04d}-0123456789ab-{self.number:012d}"
        base = None if anew else self.current
        database, index, embeddings, empty = (
            join(self.retro, name, kind) for kind in ("db", "index", "embeddings", "index_empty")
        )
        grown = {} if base is None else {"base": (join(base.database, "data"),)}
        make(database, "retro_db", grown)
        make(embeddings, "retro_embed", {"retro_db": (join(database, "data"),), **grown})
        if base is None:
            make(empty, "faiss_train", {})
        every = (*(() if base is None else base.embeddings), embeddings)
        before = empty if base is None else base.index
        make(index, "faiss_add", {"index": (before,), "embeddings": every})
        if is_published:
            self.current = RetroVersion(
                version=name.rpartition("-")[0],
                options_digest="options",
                data_path=("a",),
                database=database,
                embeddings=every,
                index=index,
            )
            store.write_bytes(join(self.retro, "current.json"), self.current.encode())
        return name

    def left(self) -> dict[str, list[str]]:
        """The outputs of each version."""
        found: dict[str, set[str]] = {}
        for name in store.list_files(self.retro):
            version, _, inside = name.partition("/")
            if inside:
                found.setdefault(version[:4], set()).add(inside.partition("/")[0])
        return {version: sorted(outputs) for version, outputs in sorted(found.items())}


def clean(root: Path, policy: Policy | None = None) -> list[str]:
    """Sweep; the reasons."""
    policy = Policy(keep_corpus_versions=1) if policy is None else policy
    done = sweep(str(root), [], policy, remove=True)
    assert done.failed == ()
    return [one.why for one in done.plan.garbage if one.kind != SCRATCH]


def test_a_version_that_grew_keeps_the_embeddings_of_those_before(tmp_path: Path) -> None:
    index = GrowingIndex(str(tmp_path))
    for _ in range(3):
        index.grow()
    make_older(tmp_path, 20 * DAY)
    assert clean(tmp_path) == ["superseded 20 days ago"] * 3
    kept = ["db", "embeddings"]  # embeddings are of chunks of their database
    assert index.left() == {"0001": kept, "0002": kept, "0003": ["db", "embeddings", "index"]}
    index.grow(anew=True)
    make_older(tmp_path, 20 * DAY)
    assert set(clean(tmp_path)) == {"superseded 20 days ago", "of no version for 20 days"}
    assert list(index.left()) == ["0004"]
    assert clean(tmp_path) == []


def test_what_was_trained_on_an_old_version_keeps_it(tmp_path: Path) -> None:
    index = GrowingIndex(str(tmp_path))
    old = index.grow()
    used = join(index.retro, old)
    make(f"{tmp_path}/run/query", "faiss_query", {"index": (f"{used}/index",)})
    index.grow(anew=True)
    third = index.grow(anew=True)
    make(f"{tmp_path}/run/model", "pretrain", {"retro_db": (f"{index.retro}/{third}/db",)})
    index.grow(anew=True)
    make_older(tmp_path, 20 * DAY)
    clean(tmp_path)
    assert index.left() == {
        "0001": ["db", "embeddings", "index"],
        "0003": ["db"],
        "0004": ["db", "embeddings", "index", "index_empty"],
    }


def test_young_versions_the_newest_and_those_at_work_stay(tmp_path: Path) -> None:
    index = GrowingIndex(str(tmp_path))
    names = [index.grow(anew=True) for _ in range(3)]
    index.grow(is_published=False)
    assert clean(tmp_path) == []
    make_older(tmp_path, 8 * DAY)
    claim(join(index.retro, names[0], "index", ".claim.json"), OTHERS)
    clean(tmp_path, Policy(keep_corpus_versions=2))
    assert list(index.left()) == ["0001", "0002", "0003", "0004"]
    store.delete(join(index.retro, names[0], "index", ".claim.json"))
    clean(tmp_path, Policy(keep_corpus_versions=2))
    assert list(index.left()) == ["0002", "0003", "0004"]
    make_older(tmp_path, 15 * DAY)
    assert "of no version for 15 days" in clean(tmp_path)
    assert list(index.left()) == ["0003"]


def test_a_flow_at_work_on_the_recipe_is_waited_for(tmp_path: Path) -> None:
    index = GrowingIndex(str(tmp_path))
    index.grow()
    index.grow(anew=True)
    make_older(tmp_path, 20 * DAY)
    claim(join(str(tmp_path), "web", ".flow.claim.json"), OTHERS)
    clean(tmp_path)
    assert list(index.left()) == ["0001", "0002"]


@pytest.mark.parametrize("pointer", ["{}", '{"format_version": 99}', "not JSON"])
def test_a_pointer_that_is_not_understood_removes_nothing(tmp_path: Path, pointer: str) -> None:
    index = GrowingIndex(str(tmp_path))
    index.grow()
    index.grow(anew=True)
    store.write_bytes(join(index.retro, "current.json"), pointer.encode())
    make_older(tmp_path, 20 * DAY)
    assert clean(tmp_path) == []
    assert list(index.left()) == ["0001", "0002"]


def test_the_folders_of_build_retro_are_no_versions(tmp_path: Path) -> None:
    index = GrowingIndex(str(tmp_path))
    index.grow()
    make(join(index.retro, "db"), "retro_db", {})
    make_older(tmp_path, 400 * DAY)
    assert clean(tmp_path) == []
