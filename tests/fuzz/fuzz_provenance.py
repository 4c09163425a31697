"""Any sidecar gives records, which can be joined, or an ArtifactError."""

from __future__ import annotations

import io

import atheris
from common import fuzz, only, scratch

with atheris.instrument_imports(include=["trainyard.corpus"]):
    from trainyard.corpus.provenance import origins, sidecar  # noqa: F401

from trainyard.corpus.provenance.origins import (
    Provenance,
    ProvenanceWriter,
    SidecarPart,
    join_provenance,
)
from trainyard.errors import ArtifactError

FOLDER = scratch()


def small(ids: bool) -> bytes:
    writer = ProvenanceWriter()
    for k in range(3):
        writer.add(f"s3://b/{k % 2}.jsonl", 10 * k, 9, k + 1, f"doc {k}" if ids else None)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


SEEDS = (small(True), small(False))


def target(data: bytes) -> None:
    path = FOLDER / "a.docs"
    path.write_bytes(data)
    whole = FOLDER / "whole.docs"
    whole.write_bytes(SEEDS[0])
    with only(ArtifactError):
        found = Provenance(str(path))
        for source in found.sources:
            found.documents_of(source)
        for k in (0, len(found) // 2, len(found) - 1):
            if 0 <= k < len(found):
                assert found[k].source in found.sources
        found.verify()
        records = [found[k] for k in range(min(len(found), 50))]
        out = io.BytesIO()
        join_provenance([SidecarPart(str(path)), SidecarPart(str(whole))], out)
        (FOLDER / "joined.docs").write_bytes(out.getvalue())
        joined = Provenance(str(FOLDER / "joined.docs"))
        joined.verify()
        assert len(joined) == len(found) + 3
        assert [joined[k] for k in range(len(records))] == records
    with only(ArtifactError):
        join_provenance([SidecarPart(str(path), {"s3://b/0.jsonl": 7})], io.BytesIO())


if __name__ == "__main__":
    fuzz(target, SEEDS)
