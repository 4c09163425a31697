"""Finds the sources of documents in the sidecars (.docs) of token files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard import json_text
from trainyard.artifacts import store
from trainyard.artifacts.inputs import Manifests, raw_digest
from trainyard.corpus.document_origins import Origins, open_origins
from trainyard.corpus.formats.records import ORIGIN
from trainyard.corpus.provenance.origins import Origin
from trainyard.errors import ArtifactError, ConfigError, TrainyardError

log = logging.getLogger(__name__)

SHOWN = 5
"""Number of sources that an error message names."""


def may_read_line(source: str, prefix: str) -> bool:
    """Whether the lines of a file are where a sidecar says, in the store of the token files or on
    this machine."""
    is_near = store.is_local(source) or source.split("/")[:3] == prefix.split("/")[:3]
    return is_near and source.endswith((".jsonl", ".json"))


class Sidecars:
    """The sidecars of token files, by prefix."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """sizes: number of documents of the token files of each prefix."""
        self._by_prefix: dict[str, Origins] = {}
        self._manifests = Manifests()
        self.unchecked: set[str] = set()
        """Prefixes whose sidecar no manifest lists, so that it may belong to other token files."""
        for prefix, num_documents in sizes.items():
            sidecar = open_origins(prefix, self._manifests)
            if sidecar is None:
                log.warning("%s.docs: no sidecar, so its documents' sources are unknown", prefix)
                continue
            if len(sidecar) != num_documents:
                raise ArtifactError(
                    f"{prefix}.docs has {len(sidecar)} documents, {prefix} has {num_documents}: "
                    "they are from different runs; rerun the stage that wrote them"
                )
            for url in sidecar.urls:
                self._check(url, prefix)
            self._by_prefix[prefix] = sidecar

    def _check(self, url: str, prefix: str) -> None:
        """Compare a sidecar with the manifest: other token files may have as many documents."""
        record = self._manifests.record(url)
        if record is None:
            self.unchecked.add(prefix)
        elif store.info(url).size_bytes != record.size_bytes or raw_digest(url) != record.digest:
            raise ArtifactError(
                f"{url} is not the one that the manifest of {prefix} lists: it is from another "
                "run, or was changed; restore it, or rerun the stage that wrote it"
            )

    def origin(self, prefix: str, document: int) -> Origin | None:
        """The origin of a document; None without a sidecar."""
        sidecar = self._by_prefix.get(prefix)
        return None if sidecar is None else sidecar[document]

    def collected(self, prefix: str, origin: Origin | None) -> dict[str, Any] | None:
        """What the line of a document says of where it was collected: its `origin`, and the page's
        address, title and revision, if it has them.

        None for a line that says nothing, and where it is not read: the file is compressed, was
        removed, is another one now, or is in another store than the token files, which this machine
        may have no access to."""
        if origin is None or not may_read_line(origin.source, prefix):
            return None
        try:
            end = origin.offset + origin.length
            fields = json_text.loads(store.read_range(origin.source, origin.offset, end))
        except (ValueError, TrainyardError) as error:
            log.info("%s: its lines are not read: %s", origin.source, error)
            return None
        if not isinstance(fields, dict) or not isinstance(fields.get(ORIGIN), dict):
            return None
        return {key: fields[key] for key in (ORIGIN, "url", "title", "revision") if key in fields}

    def documents(
        self, source: str, line: int | None, name: str | None
    ) -> dict[str, NDArray[np.int64]]:
        """The documents of a source, by prefix; `line` or `name` (an id) selects among them.

        Raises ConfigError when there is none."""
        found: dict[str, NDArray[np.int64]] = {}
        for prefix, sidecar in self._by_prefix.items():
            parts = [sidecar.documents_of(full) for full in self._matching(sidecar, source)]
            documents = np.concatenate(parts) if parts else np.empty(0, np.int64)
            if line is not None:
                documents = documents[sidecar.lines(documents) == line]
            if name is not None:
                wanted = [sidecar[k].id == name for k in documents.tolist()]
                documents = documents[np.array(wanted, np.bool_)]
            if len(documents):
                found[prefix] = documents
        if not found:
            raise ConfigError(f"--source {source}{self._why_none(source, line, name)}")
        return found

    def _matching(self, sidecar: Origins, source: str) -> list[str]:
        """Names that are the source, or end with it."""
        ending = "/" + source.lstrip("/")
        return [name for name in sidecar.sources if name == source or name.endswith(ending)]

    def _why_none(self, source: str, line: int | None, name: str | None) -> str:
        known = [full for sidecar in self._by_prefix.values() for full in sidecar.sources]
        if not known:
            return ": no sidecar (.docs) beside the token files; tokenize writes one"
        if any(self._matching(sidecar, source) for sidecar in self._by_prefix.values()):
            where = f"--line {line}" if line is not None else f"--id {name}"
            return f" {where}: no document of the source matches"
        more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
        return f": not a source of these token files, which are {', '.join(known[:SHOWN])}{more}"
