"""URLs: local paths, file:// and other fsspec URLs, treated alike. Pure text."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from trainyard.errors import ConfigError

PORT = re.compile("[0-9]{1,5}")


def is_local(url: str) -> bool:
    """True for a plain path or file://."""
    return "://" not in url or url.startswith("file://")


def is_web(url: str) -> bool:
    """True for http:// and https://."""
    return url.startswith(("http://", "https://"))


@lru_cache(maxsize=4096)  # a small run asks a hundred times for a dozen files
def local_path(url: str) -> Path | None:
    """The path behind a local URL; None for an object store."""
    if not is_local(url):
        return None
    if not url.startswith("file://"):
        return Path(url)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"{url}: file:// takes an absolute path; write file:///... or a plain path"
        )
    return Path(unquote(parts.path))


def show_url(url: str) -> str:
    """A URL as a message may have it: without user, password, query and fragment."""
    scheme, mark, rest = url.partition("://")
    if not mark or not _has_secret(url):
        return url
    address = rest.rpartition("@")[2] if _has_user(rest) else rest
    path = re.split("[?#]", address, maxsplit=1)[0].partition("/")[2]
    return f"{scheme}://...{'/' + path if path else ''}"


def refuse_secrets(url: str) -> None:
    """Refuse a URL with credentials, which would be written into manifests and logs."""
    if _has_secret(url):
        raise ConfigError(
            f"{show_url(url)}: a URL with a user, a password or a query would be "
            "written into manifests and logs; give credentials in the environment instead"
        )


def has_credentials(text: str) -> bool:
    """Whether a URL in a text of any kind, such as lines of TOML, has a user or a password."""
    words = re.split(r"[\s\"'<>]", text)
    return any(_has_user(rest) for word in words for rest in word.split("://")[1:])


def hold_credentials(value: Any) -> bool:
    """Whether `has_credentials` holds for a text in a value: keys and values of tables, lists."""
    if isinstance(value, str):
        return has_credentials(value)
    if isinstance(value, Mapping):
        return any(hold_credentials(one) for item in value.items() for one in item)
    return isinstance(value, list | tuple) and any(map(hold_credentials, value))


def _has_secret(url: str) -> bool:
    scheme, mark, rest = url.partition("://")
    is_asked = "http" in scheme.lower() and ("?" in rest or "#" in rest)
    return bool(mark) and (is_asked or _has_user(rest))


def _has_user(rest: str) -> bool:
    """Whether what follows `://` begins with USER@ or USER:PASSWORD@; a password may have a `/`."""
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    port = authority.rpartition("]")[2].partition(":")[2]
    return "@" in authority or (bool(port) and not PORT.fullmatch(port) and "@" in rest)


def canonical(url: str) -> str:
    """The one spelling of a URL: absolute, links resolved, no trailing slash."""
    path = local_path(url)
    return str(path.resolve()) if path is not None else url.rstrip("/")


def canonical_each(urls: Iterable[str]) -> Iterator[str]:
    """`canonical` of many URLs; each folder is resolved once."""
    folders: dict[str, str] = {}
    for url in urls:
        head, slash, name = url.rpartition("/")
        if "://" in url or not head or name in ("", ".", "..") or os.path.islink(url):
            yield canonical(url)
            continue
        if head not in folders:
            folders[head] = canonical(head).rstrip("/")
        yield folders[head] + slash + name


def lies_in(url: str, folder: str) -> bool:
    """True for a folder itself and for anything below it."""
    inner, outer = canonical(url), canonical(folder)
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def join(url: str, *parts: str) -> str:
    """A URL below another one."""
    joined = url
    for part in parts:
        joined = f"{joined.rstrip('/')}/{part}" if joined not in ("", "/") else joined + part
    return joined


def parent(url: str) -> str:
    """The folder that holds a URL."""
    path = local_path(url)
    if path is not None:
        return str(path.parent)
    head, _, _ = url.rstrip("/").rpartition("/")
    return head


def basename(url: str) -> str:
    """The last part of a URL."""
    return url.rstrip("/").rpartition("/")[2]


def relative(url: str, folder: str) -> str | None:
    """The path from a folder to a URL in the same store; None if they are in different stores."""
    at, start = canonical(url), canonical(folder)
    if is_local(at) and is_local(start):
        return os.path.relpath(at, start)
    (store, _, key), (other, _, prefix) = (_in_bucket(one) for one in (at, start))
    return posixpath.relpath(f"/{key}", f"/{prefix}") if store == other else None


def _in_bucket(url: str) -> tuple[str, str, str]:
    """`s3://bucket`, a slash, and what follows."""
    scheme, mark, rest = url.partition("://")
    bucket, slash, key = rest.partition("/")
    return f"{scheme}{mark}{bucket}", slash, key


def has_glob(url: str) -> bool:
    """True when the URL is a pattern."""
    return any(mark in url for mark in "*?[")


def is_hidden(name: str) -> bool:
    """True for a relative name with a part that starts with a dot, as temporary files have."""
    return any(part.startswith(".") for part in name.split("/"))


def check_relative(name: str) -> str:
    """Refuse a name that leaves its folder; returns the name.

    Names come from documents (manifests, indices) of unknown origin."""
    parts = name.split("/")
    if (
        not name
        or name.startswith("/")
        or ".." in parts
        or "" in parts
        or "\\" in name
        or "\0" in name
    ):
        raise ConfigError(f"{name!r} is not a plain relative name: it must stay inside its folder")
    return name
