"""Links in pages to files and objects. Browsers open no file:// or s3:// link from an http page.

No Prefect here."""

from __future__ import annotations

import os
from urllib.parse import quote

from trainyard.artifacts.urls import is_web, local_path
from trainyard.errors import ConfigError

BROWSE = "TRAINYARD_BROWSE"
"""Variable `PREFIX=URL`: the URL that serves a prefix, such as
`s3://yard=https://files.example.org/yard`. It overrides the `browse` of a profile."""

LOOPBACK = ("http://127.0.0.1:", "http://localhost:")


def check_browse(url: str | None) -> None:
    """Raise ConfigError for a `browse` that is no http URL."""
    if url is not None and not is_web(url):
        raise ConfigError(f"browse must begin with http:// or https://, got {url!r}")


def browsed(root: str, url: str | None) -> str:
    """`PREFIX=URL` from the environment, else from the root of all runs and the profile's `browse`;
    empty if neither is set."""
    return os.environ.get(BROWSE) or (f"{root}={url}" if url else "")


def link_to(url: str, shown: str = "") -> str:
    """The URL for a browser, by `shown` (`PREFIX=URL`); without that the address itself.

    A prefix covers whole names: `yard2/x` is not below `yard`."""
    prefix, found, server = shown.rpartition("=http")
    whole, folder = _absolute(url), _absolute(prefix).rstrip("/") + "/"
    if found and whole.startswith(folder):
        return f"http{server.rstrip('/')}/{quote(whole.removeprefix(folder))}"
    path = local_path(url)
    return url if path is None else path.absolute().as_uri()


def how_to_open(link: str) -> str:
    """A paragraph on how to open a link that browsers refuse; empty for other links."""
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
