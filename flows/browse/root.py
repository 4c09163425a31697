"""What of a root may be seen, by which name, and how it is read. Knows nothing of HTTP but its
statuses, with which it says why something may not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from trainyard.artifacts import store
from trainyard.artifacts.backends.fsspec import S3
from trainyard.artifacts.urls import (
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
"""What is shown, by the end of its name: run cards, manifests, logs, recipes, what was submitted.
Tokens and checkpoints are for no browser."""

RUNS = ".runs"
"""Run folders: the one name with a dot in front that is shown. Prefect's database, claims and files
that are being written have such names too."""

BLOCK = 2**22


class RefusedError(Exception):
    """Why something is not shown: an HTTP status, and words for a person."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Root:
    """A folder, or a prefix of an S3 store, of which names below it can be asked for.

    Names are relative, with `/` between their parts; the empty one is the root itself. Links of a
    file system are followed as far as they stay inside. A name that leads outside or to what is
    hidden raises RefusedError everywhere; what a store says is raised as it is."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for what is neither."""
        refuse_secrets(url)
        if not is_local(url) and url.partition("://")[0] not in S3:
            raise ConfigError(f"--root {url}: only a folder or s3://BUCKET/PREFIX can be shown")
        self.url = canonical(url)
        self._folder = local_path(self.url)
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(f"--root {url}: there is no such folder; runs make it, or mkdir does")

    def is_file(self, name: str) -> bool:
        """Whether a name is that of a file, of whichever kind."""
        return bool(name) and store.exists(self._place(name))

    def is_folder(self, name: str) -> bool:
        """Whether a name is that of a folder; the root is always one."""
        if self._folder is not None:
            return Path(self._place(name)).is_dir()
        return not name or any(self.entries(name))

    def kind(self, name: str) -> str | None:
        """The content type of a file by the end of its name, and where it is a link by that of
        what it leads to; None for what is not shown."""
        return KINDS.get(os.path.splitext(self._place(name))[1].lower())

    def is_shown(self, name: str) -> bool:
        """Whether a file is of a kind that is shown; False also for one that is gone by now."""
        try:
            return self.kind(name) is not None
        except RefusedError:
            return False

    def entries(self, name: str) -> tuple[list[str], dict[str, int]]:
        """The folders directly in a folder, and its files with their sizes in bytes; both sorted,
        without what is hidden or leads outside."""
        url = self._place(name)
        with store.operation("list", url) as behind:
            folders, files = behind.list_subfolders(url), behind.list_folder(url)
        sizes = {one: size for one, size in files.items() if self._is_seen(join(name, one))}
        return [one for one in folders if self._is_seen(join(name, one))], sizes

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Size in bytes and contents of a file, a block at a time.

        A file that grows meanwhile, as logs do, is read as long as it was."""
        url = self._place(name)
        if self._folder is None:
            info = store.info(url)
            yield info.size_bytes, _ranges(url, info)
            return
        with store.open_input(url) as file:
            size = os.fstat(file.fileno()).st_size
            yield size, (file.read(min(BLOCK, size - at)) for at in range(0, size, BLOCK))

    def _is_seen(self, name: str) -> bool:
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
        except (OSError, RuntimeError) as error:  # or a loop of links, or a name too long
            told = f"{url}: there is no such file or folder"
            raise RefusedError(HTTPStatus.NOT_FOUND, told) from error
        if not path.is_relative_to(self._folder):
            told = f"{url} is a link that leads out of {self.url}: not followed"
            raise RefusedError(HTTPStatus.FORBIDDEN, told)
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
    """An object in the one version that was looked at."""
    for start in range(0, info.size_bytes, BLOCK):
        end = min(start + BLOCK, info.size_bytes)
        yield store.read_range(url, start, end, info.version)
