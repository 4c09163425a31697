"""Create-only and if-match writes, the basis of one writer and one manifest per output.

A version is opaque: the digest of the contents on a file system, the ETag in an object store."""

from __future__ import annotations

from functools import lru_cache

from trainyard.artifacts import store
from trainyard.errors import ArtifactError, ConfigError


def read_version(url: str) -> tuple[bytes, str] | None:
    """Contents and version, or None for a missing file."""
    try:
        with store.operation("read", url) as behind:
            return behind.read_version(url)
    except ArtifactError:
        return None


def put_if_absent(url: str, data: bytes) -> str | None:
    """Create a small file unless it exists; the version written, or None for a lost race."""
    with store.operation("create", url) as behind:
        return behind.put_if_absent(url, data)


def replace_if_match(url: str, data: bytes, version: str) -> str | None:
    """Replace the version that was read; the new version, or None if the file changed."""
    with store.operation("replace", url) as behind:
        return behind.replace_if_match(url, data, version)


@lru_cache(maxsize=64)
def _honours_conditions(root: str) -> bool:
    with store.operation("probe", root) as behind:
        return behind.honours_conditions(root)


def require_conditions(folder_url: str) -> None:
    """Raise ConfigError for a store that accepts conditional writes and ignores the condition.

    On such a store two runs could both believe that they published."""
    if not _honours_conditions(folder_url):
        raise ConfigError(
            f"{folder_url}: this store ignores conditional writes (If-None-Match, If-Match), so "
            f"two runs could overwrite each other's files. Use a store that honours them (AWS S3, "
            f"Ceph RGW, a current SeaweedFS) or a file system for outputs"
        )
