"""Digests of inputs that are read in shares: no process reads all of one.

A share goes by the versions of the files, and digests the blocks of its own ranges as it reads
them; the join combines those. Of a file of several blocks that is not its usual digest: it would
follow from the blocks by the tree of blake3, at a tenth of the speed (`subtree_digest`). So the
manifest that a join publishes marks such an input, and a later run, with or without shares, digests
its input in the way of the manifest that it finds. A run without shares records the lineage that
its shares would have, by which shares find its output.

`.blocks.json` of a share has the files of which it read ranges, the versions that it saw, and the
digests of the blocks that begin in its ranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from stages.runtime.context import StageRun
from stages.runtime.joined_shares import (
    check_all_list,
    check_all_made,
    read_all,
    several_at_once,
)
from trainyard.artifacts import store
from trainyard.artifacts.block_digest import MARK, block_digest, remember_digest, version_mark
from trainyard.artifacts.inputs import Manifests, OfRaw
from trainyard.artifacts.output import Output
from trainyard.artifacts.store import FileInfo
from trainyard.artifacts.urls import canonical
from trainyard.corpus.pairs import BLOCKS
from trainyard.errors import ArtifactError, DataError

FORMAT_VERSION = 1

SHARES_LINEAGE = "shares_lineage"
"""Key in the `run` of a manifest: the lineage of the shares that were joined."""

AS_SHARES = "lineage_as_shares"
"""The same, of a run without shares: the one that shares of this input would have."""


@runtime_checkable
class DigestedInShares(Protocol):
    """What the options of a stage have whose shares digest their own ranges of some inputs (see
    `stages.tokenize`)."""

    @property
    def rank(self) -> int | None:
        """The share to make; None for the whole."""

    @property
    def world_size(self) -> int | None:
        """The number of shares; None for a run without any."""

    def digested_inputs(self) -> Sequence[str]:
        """The names of these inputs."""

    def all_shares(self) -> list[Output]:
        """The shares, in order; empty for a run without any."""

    def can_be_shared(self) -> bool:
        """Whether these options let several runs make the output."""


# --- a run decides ----------------------------------------------------------------------------


def of_raw_files(
    stage: str, config: object, recorded: Mapping[str, str] | None
) -> dict[str, OfRaw]:
    """What stands for the contents of the raw files of inputs, by name; of others, their digests.

    recorded: digests of inputs in the manifest of the output; None without one.

    Raises ArtifactError if shares to join are missing or of an earlier version, before any input is
    read."""
    if not isinstance(config, DigestedInShares):
        return {}
    names = config.digested_inputs()
    if config.rank is not None:
        return dict.fromkeys(names, version_mark)
    if _combine_digests(stage, config.all_shares(), is_made=recorded is not None):
        return dict.fromkeys(names, block_digest)
    marked = {name for name, digest in (recorded or {}).items() if digest.startswith(MARK)}
    return {name: block_digest for name in names if name in marked}


def _combine_digests(stage: str, shares: Sequence[Output], is_made: bool) -> bool:
    """Remember the digests of the files that the shares read together. False if there are none to
    join: of an output that is made, they are gone."""
    found = read_all(shares)
    if not shares or (is_made and not all(one and one.record(BLOCKS) for one in found)):
        return False
    check_all_list(shares, check_all_made(shares, found, stage), BLOCKS, stage)
    read = several_at_once(lambda share: _read_blocks(share.file_url(BLOCKS)), shares)

    def remember(url: str) -> None:
        seen = [one[url] for one in read if url in one]
        if len({info for info, _ in seen}) == 1:  # or else the join refuses some of the shares
            blocks = {number: digest for _, some in seen for number, digest in some.items()}
            remember_digest(url, seen[0][0], blocks)

    several_at_once(remember, sorted({url for one in read for url in one}))
    return True


def _read_blocks(url: str) -> dict[str, tuple[FileInfo, dict[int, str]]]:
    """The files of which a share read ranges, by URL: the version, and digests by block."""
    document: Any = store.read_json(url)
    try:
        if document["format_version"] != FORMAT_VERSION:
            raise ValueError("of another version")
        return {
            str(file): (
                FileInfo(int(read["size_bytes"]), str(read["version"])),
                {int(number): str(digest) for number, digest in read["digests"].items()},
            )
            for file, read in document["files"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{url}: not the blocks of a share ({error!r})") from error


# --- a share digests --------------------------------------------------------------------------


def files_to_digest(files: Iterable[tuple[str, FileInfo]]) -> dict[str, FileInfo]:
    """Those of a share's files of which it digests blocks. Not a file that a manifest lists, which
    has a digest, nor one without a version, which every share reads."""
    manifests = Manifests()
    return {url: info for url, info in files if info.version and not manifests.listed(url)}


def write_blocks(
    stage: StageRun, files: Mapping[str, FileInfo], digests: Mapping[str, Mapping[int, str]]
) -> None:
    """Write the `.blocks.json` of a share. digests: of blocks, by URL and number.

    Raises DataError for a file that changed while it was read."""
    for url, info in files.items():
        if store.info(url) != info:
            raise DataError(f"{url}: changed while it was read; run again")
    read = {
        canonical(url): {
            "size_bytes": info.size_bytes,
            "version": info.version,
            "digests": {str(number): one for number, one in digests.get(url, {}).items()},
        }
        for url, info in files.items()
    }
    # Volatile: tokens do not depend on where the files are, and when they were written.
    stage.write_json(BLOCKS, {"format_version": FORMAT_VERSION, "files": read}, volatile=True)
