"""Texts of recipes, configs, presets and profiles, by a path or URL from anyone.

The URL may come from an untrusted user: it is checked strictly, and errors never show its
secrets."""

from __future__ import annotations

from trainyard.artifacts import store
from trainyard.artifacts.urls import basename, refuse_secrets, show_url
from trainyard.errors import ArtifactError, ConfigError


def read_text(url: str) -> str:
    """The text of a document.

    Raises ConfigError for a URL with credentials or with `?` or `#`, behind which an ending is not
    that of the file; ArtifactError for a file that is missing or not text. Messages begin with the
    URL as `show_url` has it."""
    refuse_secrets(url)
    if "://" in url and ("?" in url or "#" in url):
        raise ConfigError(f"{show_url(url)}: the URL of a document must have no '?' and no '#'")
    try:
        return store.read_document(url).decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{url}: not a text file: byte {error.start} is not UTF-8") from None


def suffix(url: str) -> str:
    """The ending of the name of a document, such as `.toml`; empty without one."""
    head, dot, ending = basename(url).rpartition(".")
    return dot + ending if head else ""
