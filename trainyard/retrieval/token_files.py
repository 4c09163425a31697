"""Identity of a pair of token files, or of a virtual dataset."""

from __future__ import annotations

from trainyard.artifacts.digest import digest_files
from trainyard.artifacts.inputs import Manifests
from trainyard.corpus.virtual import files_of


def pair_digest(prefix: str, name: str = "") -> str:
    """The digest of the files of a prefix as if they were called NAME.bin and NAME.idx: the same
    for copies. Reads only files that no manifest lists and whose digest is not cached."""
    manifests = Manifests()
    urls = {name + ending: url for ending, url in files_of(prefix, manifests).items()}
    return digest_files((n, manifests.size(u), manifests.file_digest(u)) for n, u in urls.items())
