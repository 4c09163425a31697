"""Files of an output that a killed run finished: each is a unit of work of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.inputs import NUM_THREADS
from trainyard.artifacts.manifest import check_digest
from trainyard.artifacts.store import FileRecord, SourceFile

log = logging.getLogger(__name__)


def finish_file(stage: StageRun, key: str, record: FileRecord, facts: Mapping[str, Any]) -> None:
    """Mark a closed file of the output as finished, with facts that a later run needs."""
    stage.work.publish(key, {"file": asdict(record), "facts": dict(facts)})


def finished_file(stage: StageRun, key: str) -> dict[str, Any] | None:
    """The facts about a file that a killed run finished, which becomes a file of this run; None if
    it is not finished or has another size."""
    unit = stage.work.published(key)
    if unit is None:
        return None
    assert stage.output is not None
    record = FileRecord(**unit["file"])
    url = stage.output.file_url(record.path)
    size_bytes = store.info(url).size_bytes if store.exists(url) else 0
    if size_bytes != record.size_bytes:
        log.warning(
            "%s has %d bytes, and %d when a killed run finished it; making it again",
            *(url, size_bytes, record.size_bytes),
        )
        return None
    stage.record(record)
    facts: dict[str, Any] = unit["facts"]
    return facts


def move_file(stage: StageRun, path: Path, name: str) -> FileRecord:
    """Move a local file into the output under a name."""
    with stage.open(name) as out, path.open("rb") as file:
        while piece := file.read(store.CHUNK):
            out.write(piece)
    path.unlink()
    return out.record


def copy_file(
    stage: StageRun,
    url: str,
    name: str,
    record: FileRecord | None = None,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> None:
    """Copy a file into the output under a name, unless a killed run has. record: the file in the
    manifest of its artifact; ArtifactError if its contents are others."""
    copy_files(stage, [(url, record)], name, on_bytes)


def copy_files(
    stage: StageRun,
    files: Sequence[tuple[str, FileRecord | None]],
    name: str,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> None:
    """As `copy_file`, of files of which none is empty, laid end to end."""
    key = f"copy-{digest_bytes(name.encode())[:24]}"
    if finished_file(stage, key) is not None:
        return
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="copy") as threads:
        found = list(threads.map(store.info, (url for url, _ in files)))
    sources = [
        SourceFile(url, one.size_bytes, one.version)
        for (url, _), one in zip(files, found, strict=True)
    ]
    with stage.open(name) as out:
        for (url, record), digest in zip(files, out.append_files(sources, on_bytes), strict=True):
            if record is not None:
                check_digest(url, record, digest)
    finish_file(stage, key, out.record, {})
