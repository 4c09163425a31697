"""Small yards with everything in them that a sweep looks at."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.gc.policy import Policy
from flows.recipes.corpus_versions import CURRENT, CorpusObject, CorpusVersion
from trainyard.artifacts import conditional, store
from trainyard.artifacts.claim import Holder
from trainyard.artifacts.manifest import InputRecord, Manifest, publish, read_slot, retire
from trainyard.artifacts.output import Output
from trainyard.artifacts.parts_list import Part, PartsList
from trainyard.artifacts.process import machine_mark
from trainyard.artifacts.urls import join

AT_ONCE = Policy(
    keep_corpus_versions=1, corpus_days=0, upload_hours=0, attempt_days=0, keep_runs=1, run_days=0
)
"""Nothing is kept for its age; who renews a claim is alive."""

OTHERS = Holder("run", "elsewhere", "another machine", 7, "1", "now")
GONE = Holder("run", "here", machine_mark(), 2**22 + 1, "1", "long ago")


def make(
    output: Output,
    files: Mapping[str, bytes],
    inputs: Mapping[str, Sequence[str]] | None = None,
    stage: str = "merge",
) -> Manifest:
    """Publish an artifact, of inputs that are artifacts as well."""
    records = tuple(
        store.write_bytes(output.file_url(name), data, name) for name, data in files.items()
    )
    made_of = {
        name: InputRecord(tuple(urls), digest_of(urls[0])) for name, urls in (inputs or {}).items()
    }
    manifest = Manifest(stage=stage, files=records, inputs=made_of)
    publish(output.manifest_url, manifest, None)
    return manifest


def digest_of(url: str) -> str:
    """The output digest of a prefix's artifact."""
    return str(store.read_json(f"{url}.manifest.json")["output_digest"])


class Corpus:
    """A corpus as corpus-refresh makes it, of sources that are texts."""

    def __init__(self, root: str, name: str = "web") -> None:
        self.root, self.url, self.number = root, join(root, name), 0
        self.previous: str | None = None

    def part(self, text: str) -> str:
        """Tokens of a source, made if missing."""
        url = join(self.url, "parts", "options", f"{text}0123")
        if not store.exists(f"{url}.manifest.json"):
            files = {"_text_document.bin": text.encode() * 100, "_text_document.idx": b"1"}
            make(Output.prefix(url), files, stage="tokenize")
        return url

    def publish(self, *texts: str, is_virtual: bool = False) -> str:
        """A new version of these sources; the prefix of its tokens."""
        self.number += 1
        name = f"{self.number:04d}-abc"
        tokens = join(self.url, "versions", name, "corpus_text_document")
        parts = [self.part(text) for text in texts]
        data = "".join(texts).encode() * 100
        files = {".bin": data, ".idx": b"2"}
        if is_virtual:
            files = {".parts": parts_list(parts, tokens)}
        make(Output.prefix(tokens), files, {"input": parts})
        version = CorpusVersion(
            version=name,
            number=self.number,
            options_digest="options",
            tokens={"text": tokens},
            sources=tuple(
                CorpusObject(f"/sources/{t}", t, p) for t, p in zip(texts, parts, strict=True)
            ),
            previous=self.previous,
        )
        self.previous = name
        store.write_bytes(join(self.url, "versions", name, "version.json"), version.encode())
        store.write_bytes(join(self.url, CURRENT), version.encode())
        return tokens


def parts_list(parts: Sequence[str], prefix: str) -> bytes:
    """The virtual dataset of the tokens of these sources."""
    records = [Part(f"{part}_text_document", 1, 1, 100, "b" * 64, "i" * 64) for part in parts]
    return PartsList("uint16", False, False, tuple(records)).encode(prefix + ".parts")


def train(url: str, tokens: str) -> None:
    """A finished training on a version of a corpus."""
    make(Output.directory(url), {"ledger.jsonl": b"{}"}, {"data_path": [tokens]}, "pretrain")


def step(url: str, digests: Mapping[str, str]) -> None:
    """A step of a running training: it knows its inputs by digest alone."""
    config = json.dumps({"inputs": dict(digests)}).encode()
    make(
        Output.directory(url), {"config.json": config, "model.safetensors": b"m"}, None, "pretrain"
    )


def claim(url: str, holder: Holder) -> None:
    """Lay a claim as its holder would."""
    assert conditional.put_if_absent(url, holder.encode(0)) is not None


def begin_to_replace(output: Output) -> None:
    """Do what a run does that is killed in the middle of replacing an artifact."""
    slot = read_slot(output.manifest_url)
    assert slot is not None
    retire(output.manifest_url, slot, "lineage")


def make_older(folder: Path, seconds: float) -> None:
    """Let everything in a folder be as old as that."""
    then = time.time() - seconds
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (then, then))
