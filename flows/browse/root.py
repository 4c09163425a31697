"""Decides which files of a root are shown, and reads them. It knows nothing of HTTP except the
statuses of its refusals."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from trainyard.artifacts import store
from trainyard.artifacts.backends.fsspec import S3
from trainyard.artifacts.urls import (
    basename,
    canonical,
    check_relative,
    is_local,
    join,
    local_path,
    refuse_secrets,
)
from trainyard.errors import ConfigError

TEXT = "text/plain; charset=utf-8"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
    **dict.fromkeys((".jsonl", ".md", ".sbatch", ".toml", ".txt", ".yaml"), TEXT),
}
"""Kinds of files that are shown: run cards, manifests, logs, recipes, submitted scripts. Tokens and
checkpoints are not shown."""

PROFILES = re.compile(
    r"profile-rank[0-9]+-steps-[0-9]+-[0-9]+\.json\.gz|memory-history-rank[0-9]+\.pickle"
)
"""Names of files that run cards link to; a browser saves them instead of opening them."""
DOWNLOAD = "application/octet-stream"

RUNS = ".runs"
"""Run folders: the only hidden name that is shown. Prefect's database, claims and files that are
being written are hidden too."""

BLOCK = 2**22


class RefusedError(Exception):
    """Why a name is not shown: an HTTP status and a message."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Root:
    """A folder or a prefix of an S3 store, read by relative names.

    Names have `/` between their parts; the empty one is the root itself. Links in a file system
    are followed inside the root. A name that leads outside or to a hidden file raises RefusedError
    in every method; errors of a store are raised unchanged."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for any other URL, and for a missing folder."""
        refuse_secrets(url)
        if not is_local(url) and url.partition("://")[0] not in S3:
            raise ConfigError(f"--root {url}: only a folder or s3://BUCKET/PREFIX can be shown")
        self.url = canonical(url)
        self._folder = local_path(self.url)
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(
                f"--root {url}: there is no such folder; create it, or start a run that creates it"
            )

    def is_file(self, name: str) -> bool:
        """Whether a name is a file, of any kind."""
        return bool(name) and store.exists(self._place(name))

    def is_folder(self, name: str) -> bool:
        """Whether a name is a folder; the root always is."""
        if self._folder is not None:
            return Path(self._place(name)).is_dir()
        return not name or any(self.entries(name))

    def kind(self, name: str) -> str | None:
        """The content type of a file by its name, or that of a link's target; None if it is not
        shown."""
        place = self._place(name)
        if PROFILES.fullmatch(basename(place)):
            return DOWNLOAD
        return KINDS.get(os.path.splitext(place)[1].lower())

    def is_shown(self, name: str) -> bool:
        """Whether a file is of a kind that is shown; False also if it no longer exists."""
        try:
            return self.kind(name) is not None
        except RefusedError:
            return False

    def entries(self, name: str) -> tuple[list[str], dict[str, int]]:
        """The subfolders of a folder, and its files with their sizes in bytes; both sorted, without
        those that are hidden or lead outside."""
        url = self._place(name)
        with store.operation("list", url) as behind:
            folders, files = behind.list_subfolders(url), behind.list_folder(url)
        visible = (one for one in files if self._is_visible(join(name, one)))
        sizes = {one: files[one][0] for one in visible}
        return [one for one in folders if self._is_visible(join(name, one))], sizes

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Size in bytes and contents of a file, block by block.

        A file that grows, such as a log, is read up to its size at the start."""
        url = self._place(name)
        if self._folder is None:
            info = store.info(url)
            yield info.size_bytes, _ranges(url, info)
            return
        with store.open_input(url) as file:
            size = os.fstat(file.fileno()).st_size
            yield size, (file.read(min(BLOCK, size - at)) for at in range(0, size, BLOCK))

    def _is_visible(self, name: str) -> bool:
        try:
            self._place(name)
        except RefusedError:
            return False
        return True

    def _place(self, name: str) -> str:
        """The URL of a name, links resolved."""
        _check(name)
        url = join(self.url, name) if name else self.url
        if self._folder is None:
            return url
        try:
            path = Path(url).resolve(strict=True)
        except (OSError, RuntimeError) as error:  # or a loop of links, or a long name
            message = f"{url}: there is no such file or folder"
            raise RefusedError(HTTPStatus.NOT_FOUND, message) from error
        if not path.is_relative_to(self._folder):
            message = f"{url} is a link that leads out of {self.url}: not followed"
            raise RefusedError(HTTPStatus.FORBIDDEN, message)
        inner = path.relative_to(self._folder).as_posix()
        _check("" if inner == "." else inner)
        return str(path)


def _check(name: str) -> None:
    if not name:
        return
    try:
        check_relative(name)
        name.encode()
    except (ConfigError, UnicodeEncodeError) as error:
        raise RefusedError(
            HTTPStatus.BAD_REQUEST, f"{name!r} is not a name below the root: ask for /a/b.html"
        ) from error
    for part in name.split("/"):
        if part.startswith(".") and part != RUNS:
            raise RefusedError(
                HTTPStatus.FORBIDDEN, f"{part}: names that begin with a dot are not shown"
            )


def _ranges(url: str, info: store.FileInfo) -> Iterator[bytes]:
    """The contents of one version of an object."""
    for start in range(0, info.size_bytes, BLOCK):
        end = min(start + BLOCK, info.size_bytes)
        yield store.read_range(url, start, end, info.version)
