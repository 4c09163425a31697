"""What a page links to, given where something lies: browsers follow no link from a page of http to
a file or to S3. No Prefect here."""

from __future__ import annotations

import os
from urllib.parse import quote

from trainyard.artifacts.urls import is_web, local_path
from trainyard.errors import ConfigError

BROWSE = "TRAINYARD_BROWSE"
"""Variable `PREFIX=URL`: where a browser finds what lies under a prefix, such as
`s3://yard=https://files.example.org/yard`. It goes over the `browse` of a profile."""

LOOPBACK = ("http://127.0.0.1:", "http://localhost:")


def check_browse(url: str | None) -> None:
    """Refuse what no browser opens, as the `browse` of a profile."""
    if url is not None and not is_web(url):
        raise ConfigError(f"browse must begin with http:// or https://, got {url!r}")


def browsed(root: str, url: str | None) -> str:
    """`PREFIX=URL` as the environment has it; else of the root of all runs and the `browse` of a
    profile; empty where there is neither."""
    return os.environ.get(BROWSE) or (f"{root}={url}" if url else "")


def link_to(url: str, shown: str = "") -> str:
    """The URL that a browser opens, where `shown` (`PREFIX=URL`) says it; else the place itself.

    A prefix ends where a name does: what lies in `yard2` is not below `yard`."""
    prefix, found, server = shown.rpartition("=http")
    whole, folder = _absolute(url), _absolute(prefix).rstrip("/") + "/"
    if found and whole.startswith(folder):
        return f"http{server.rstrip('/')}/{quote(whole.removeprefix(folder))}"
    path = local_path(url)
    return url if path is None else path.absolute().as_uri()


def how_to_open(link: str) -> str:
    """A paragraph for whom a link alone does not help; empty where it does."""
    if link.startswith(LOOPBACK):
        return "\n\nThe link is served by `make ui`, or by hand by `python -m flows.browse`."
    if is_web(link):
        return ""
    return (
        f"\n\nBrowsers do not open this kind of link from a page: copy it, or set {BROWSE} to "
        "where a web server shows the files (`PREFIX=URL`)."
    )


def _absolute(url: str) -> str:
    path = local_path(url)
    return url if path is None else str(path.absolute())
