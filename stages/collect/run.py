"""Extracts documentation from sources, holds some out, and distributes the rest over shards."""

from __future__ import annotations

import hashlib
import json
import logging
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from stages.collect.config import (
    OURSELVES,
    PYTHON,
    CollectConfig,
    environment_fingerprint,
    site_folders,
)
from stages.runtime.context import StageRun
from trainyard.corpus import docstrings as doc
from trainyard.errors import ConfigError, DataError

log = logging.getLogger(__name__)

Modules = dict[str, tuple[str, Path]]
"""Relative name of a source to its package and path."""

HELDOUT_SHARE = 0.01
HELDOUT_BYTES = 150_000
ANSWER_CHARS = 240
"""Of the longest answer to a question."""


@dataclass(frozen=True, slots=True)
class CollectedDocument:
    """One document."""

    id: str
    src: str
    text: str
    question: str = ""
    """What the text answers; empty: it stands alone."""

    @property
    def hash(self) -> str:
        """Hash of the id; decides the shard, and whether the entry is held out."""
        return hashlib.sha256(self.id.encode()).hexdigest()


def run(config: CollectConfig, stage: StageRun) -> dict[str, Any]:
    """Write the documents of the source; of Python, the shards and heldout.txt."""
    if config.source != PYTHON:
        from stages.collect.sources import collect_sources

        return collect_sources(config, stage)
    if config.environment != environment_fingerprint():
        raise ConfigError(
            "--environment is the fingerprint of another Python or of other packages than those in "
            "use; leave the option out"
        )
    limit = int(config.max_size_mb * 1e6)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    found: list[CollectedDocument] = []
    with stage.progress(limit, "bytes", "collect") as progress:
        entries = distinct(all_entries(stdlib, installed_modules))
        if config.conversations:
            entries = filter(None, map(as_question, entries))
        for entry in take(entries, limit):
            found.append(entry)
            progress.update(len(entry.text.encode()))
    if not found:
        raise DataError(f"{stdlib}: no documentation found in the sources of this Python")
    training, heldout = hold_out(sorted(found, key=lambda entry: entry.id))
    metrics = _write(training, heldout, config, stage)
    log.info("collected %s", " ".join(f"{key}={value}" for key, value in metrics.items()))
    return metrics


def _write(
    training: list[CollectedDocument],
    heldout: list[CollectedDocument],
    config: CollectConfig,
    stage: StageRun,
) -> dict[str, Any]:
    shards = distribute(training, config.num_shards)
    for number, shard in enumerate(shards):
        stage.write_text(f"train-{number:05d}.jsonl", "".join(map(as_line, shard)))
    if config.conversations:
        stage.write_text("heldout.jsonl", "".join(map(as_line, heldout)))
    else:
        stage.write_text("heldout.txt", "\n\n".join(entry.text for entry in heldout) + "\n")
    return {
        "documents": len(training),
        "bytes": sum(len(entry.text.encode()) for entry in training),
        "heldout_documents": len(heldout),
        "heldout_bytes": sum(len(entry.text.encode()) for entry in heldout),
    }


# --- sources ---------------------------------------------------------------------------------


def all_entries(stdlib: Path, installed: Callable[[], Modules]) -> Iterator[CollectedDocument]:
    """Help topics, then the standard library, then packages in an order that mixes them.

    Of packages, which are many, only well documented modules are read."""
    topics = stdlib / "pydoc_data" / "topics.py"
    if topics.is_file():
        for name, text in doc.topics(topics.read_bytes()):
            yield CollectedDocument(f"pydoc/{name}", "pydoc", text.strip())
    for relative in doc.module_files(stdlib):
        if not relative.startswith("pydoc_data/"):
            yield from _of_module(relative, "python", (stdlib / relative).read_bytes())
    modules = installed()
    for relative in sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest()):
        package, path = modules[relative]
        source = path.read_bytes()
        if doc.is_well_documented(source):
            yield from _of_module(relative, package, source)


def installed_modules() -> Modules:
    """Python sources of every installed package but ours."""
    modules: Modules = {}
    for distribution in metadata.distributions(path=site_folders()):
        package = distribution.metadata["Name"] or ""
        if package.lower() == OURSELVES:
            continue
        for file in distribution.files or ():
            wanted = (
                file.suffix == ".py" and ".." not in file.parts and not doc.is_skipped(file.parts)
            )
            if wanted and (path := Path(str(file.locate()))).is_file():
                modules.setdefault(file.as_posix(), (package, path))
    return modules


def _of_module(relative: str, src: str, source: bytes) -> Iterator[CollectedDocument]:
    module = doc.module_name(relative)
    seen: dict[str, int] = {}
    for name, text in doc.docstrings(source):
        seen[name] = seen.get(name, 0) + 1
        again = f"#{seen[name]}" if seen[name] > 1 else ""  # overloads, property setters
        yield CollectedDocument(f"{src}/{module}:{name}{again}", src, text)


# --- selection --------------------------------------------------------------------------------


def distinct(entries: Iterator[CollectedDocument]) -> Iterator[CollectedDocument]:
    """Wanted texts, each once."""
    seen: set[bytes] = set()
    for entry in entries:
        if not doc.is_wanted(entry.text):
            continue
        digest = hashlib.sha256(entry.text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield entry


def as_question(entry: CollectedDocument) -> CollectedDocument | None:
    """The entry as an answer to a question: the first paragraph of the docstring of a function or
    class. None for other entries, and for a longer paragraph."""
    source, _, name = entry.id.partition(":")
    answer = " ".join(entry.text.split("\n\n")[0].split())
    if not name or "#" in name or not answer.endswith(".") or len(answer) > ANSWER_CHARS:
        return None
    asked = f"What does {source.rpartition('/')[2]}.{name} do?"
    return replace(entry, text=answer, question=asked)


def take(entries: Iterator[CollectedDocument], limit_bytes: int) -> Iterator[CollectedDocument]:
    """Entries until their texts reach `limit_bytes`."""
    total = 0
    for entry in entries:
        yield entry
        total += len(entry.text.encode())
        if total >= limit_bytes:
            return


def hold_out(
    entries: list[CollectedDocument],
) -> tuple[list[CollectedDocument], list[CollectedDocument]]:
    """(training, held-out). About one entry in a hundred is held out, by its hash, up to
    HELDOUT_BYTES."""
    training, heldout, size = [], [], 0
    for entry in entries:
        num_bytes = len(entry.text.encode())
        chosen = int(entry.hash[:8], 16) < HELDOUT_SHARE * 2**32
        if chosen and size + num_bytes <= HELDOUT_BYTES:
            heldout.append(entry)
            size += num_bytes
        else:
            training.append(entry)
    return training, heldout


def distribute(entries: list[CollectedDocument], num_shards: int) -> list[list[CollectedDocument]]:
    """The entries of each shard, in the order given."""
    shards: list[list[CollectedDocument]] = [[] for _ in range(num_shards)]
    for entry in entries:
        shards[int(entry.hash[8:16], 16) % num_shards].append(entry)
    return shards


def as_line(entry: CollectedDocument) -> str:
    """The entry as a line of JSONL: a document, or a conversation of two turns."""
    document: dict[str, Any] = {"text": entry.text, "src": entry.src, "id": entry.id}
    if entry.question:
        turns = (("user", entry.question), ("assistant", entry.text))
        document["messages"] = [{"role": role, "content": text} for role, text in turns]
        del document["text"]
    return json.dumps(document, ensure_ascii=False) + "\n"
