"""Identity of a pair of token files."""

from __future__ import annotations

from trainyard.artifacts.digest import digest_files
from trainyard.artifacts.inputs import PAIR, Manifests


def pair_digest(prefix: str, name: str = "") -> str:
    """The digest of the pair as if its files were called NAME.bin and NAME.idx: the same for
    copies. Reads only files that no manifest lists and whose digest is not cached."""
    manifests = Manifests()
    urls = {name + ending: prefix + ending for ending in PAIR}
    return digest_files((n, manifests.size(u), manifests.file_digest(u)) for n, u in urls.items())
