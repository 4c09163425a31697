"""Versions of documents: their parts stay while a version needs them, whatever else goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from flows.gc.contents import look
from flows.gc.policy import Policy
from flows.gc.superseded import superseded
from flows.recipes.corpus_versions import CURRENT, CorpusObject, CorpusVersion
from tests.flows.gc.yards import make_older
from trainyard.artifacts import store
from trainyard.artifacts.manifest import InputRecord, Manifest, publish
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join


def make(folder: str, text: str, inputs: Sequence[str] = ()) -> None:
    """A finished output, of inputs that others know by their digest alone."""
    output = Output.directory(folder)
    record = store.write_bytes(
        output.file_url("documents-0.jsonl"), text.encode(), "documents-0.jsonl"
    )
    made_of = {"input": InputRecord(tuple(inputs), folder)} if inputs else {}
    publish(output.manifest_url, Manifest(stage="mix", files=(record,), inputs=made_of), None)


def version(root: str, number: int, *texts: str) -> str:
    """A version of these sources, as collect-corpus makes it; the folder of its documents."""
    parts = []
    for text in texts:
        part = join(root, "web/parts/options", text)
        if not store.exists(f"{part}/clean/manifest.json"):
            make(f"{part}/collect", text)
            make(f"{part}/clean", text * 2, [f"{part}/collect/documents-*.jsonl"])
        parts.append(f"{part}/clean")
    name = f"{number:04d}-abc"
    folder = join(root, "web/versions", name, "mix")
    make(folder, f"{number} {texts}", [f"{part}/documents-*.jsonl" for part in parts])
    document = CorpusVersion(
        version=name,
        number=number,
        options_digest="options",
        tokens={},
        sources=tuple(
            CorpusObject(f"/s/{t}", t, part) for t, part in zip(texts, parts, strict=True)
        ),
        documents=(f"{folder}/documents-*.jsonl",),
        datasheet=join(root, "web/versions", name, "datasheet"),
    ).encode()
    store.write_bytes(join(root, "web/versions", name, "version.json"), document)
    store.write_bytes(join(root, "web", CURRENT), document)
    return folder


def garbage(root: str) -> list[str]:
    policy = Policy(keep_corpus_versions=1, corpus_days=7)
    found, _ = superseded(look(root, policy), policy, [])
    return sorted(one.url.removeprefix(f"{root}/").rstrip("/") for one in found)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_only_what_no_kept_version_needs_goes(tmp_path: Path, is_mixed: bool) -> None:
    root = str(tmp_path)
    old = version(root, 1, "gone", "both")
    version(root, 2, "both", "new")
    if is_mixed:  # another corpus was mixed of the old version
        make(join(root, "both/mix"), "mixed", [f"{old}/documents-*.jsonl"])
    make_older(tmp_path, 30 * 86400)
    parts = ["web/parts/options/gone/clean", "web/parts/options/gone/collect"]
    assert garbage(root) == ([] if is_mixed else [*parts, "web/versions/0001-abc"])
