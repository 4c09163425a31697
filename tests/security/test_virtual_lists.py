"""Lists of a virtual dataset that others wrote: none is read beyond its parts, takes long, shows a
password or ends in a traceback."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.security.test_broken_documents import BROKEN
from tests.trainyard.corpus.test_virtual import merge, put_parts
from trainyard.artifacts import store
from trainyard.corpus.indexed import IndexedDataset
from trainyard.errors import ArtifactError, ConfigError

SECRET = "hunter2"
LONGEST_MESSAGE = 1000
SOON_SECONDS = 10
MOST = 2**63 - 1

Change = Callable[[dict[str, Any]], object]


def each(**fields: Any) -> Change:
    """Other values in every part."""
    return lambda document: [part.update(fields) for part in document["parts"]]


PREFIXES = {
    "a password": f"s3://me:{SECRET}@bucket/a",
    "a password of the web": f"https://me:{SECRET}@h/a",
    "a password of a file": f"file://me:{SECRET}@h/a",
    "a query": f"https://h/a?token={SECRET}",
    "the web": "http://127.0.0.1:9/a",
    "a metadata service": "HTTP://169.254.169.254/a",
    "a metadata service behind a cache": "simplecache::http://169.254.169.254/a",
    "a metadata service as a cluster": "webhdfs://169.254.169.254:80/a",
    "a server of files": "ftp://127.0.0.1/a",
    "this machine by another name": "local:///etc/passwd",
    "an archive": "zip:///etc/passwd",
    "a file system of another": "dir:///etc/passwd",
    "every file system": "generic:///etc/passwd",
    "data": "data://text/plain,a",
    "no protocol": "://a",
    "another host": "file://host/a",
    "a file of secrets": "/etc/passwd",
    "a file without end": "/dev/zero",
    "an environment": "/proc/self/environ",
    "the root": "/",
    "a way up": "../" * 100 + "etc/passwd",
    "itself": "forged",
    "a home": "~/a",
    "a variable": "${HOME}/a",
    "a pattern": "*",
    "NUL": "a\0b",
    "a line feed": "a\nb",
    "half a character": "\ud800",
    "a long name": "a" * 10**6,
    "a deep folder": "a/" * 10**5,
}
CHANGES: dict[str, Change] = {
    **{name: each(prefix=prefix) for name, prefix in PREFIXES.items()},
    "counts of all documents": each(documents=MOST, sequences=MOST),
    "counts of a full disk": each(documents=2**31, sequences=2**31),
    "sizes beyond a disk": each(size_bytes=MOST - 1),
    "sizes beyond 64 bits": each(size_bytes=2**64),
    "no sizes": each(size_bytes=0, documents=0, sequences=0),
    "flags as sizes": each(documents=True),
    "fractions": each(documents=1.0),
    "a digest that leads elsewhere": each(idx_digest="../../../etc/passwd"),
    "a prefix that is none": each(prefix={}),
    "a table of parts": lambda document: document.update(parts={"a": 1}),
    "a text of parts": lambda document: document.update(parts="abc"),
    "lists as parts": lambda document: document.update(parts=[[]]),
    "a long type": lambda document: document.update(dtype="\x1b]0;" * 10**5),
    "a type that is a list": lambda document: document.update(dtype=["uint16"]),
    "a version of letters": lambda document: document.update(format_version="\x1b" * 10**5),
    "a version that is none": lambda document: document.update(format_version=None),
}


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The list of a virtual dataset, to be changed; no manifest has its digest."""
    folder = tmp_path_factory.mktemp("virtual")
    put_parts(str(folder / "parts"))
    merge(str(folder / "all"), str(folder / "parts"), virtual=True)
    path = folder / "forged.parts"
    path.write_bytes((folder / "all.parts").read_bytes())
    assert IndexedDataset(str(folder / "forged")).num_tokens == 12
    return path


def refused(path: Path, text: str) -> str:
    """The message about a list."""
    whole, began = path.read_bytes(), time.process_time()
    try:
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises((ArtifactError, ConfigError)) as error:
            IndexedDataset(str(path.with_suffix(""))).get(0)
    finally:
        path.write_bytes(whole)
    assert time.process_time() - began < SOON_SECONDS
    return str(error.value)


@pytest.mark.few_cases(12)
@pytest.mark.parametrize("kind", CHANGES)
def test_a_forged_list_is_refused_in_a_sentence(kind: str, forged: Path) -> None:
    document = copy.deepcopy(json.loads(forged.read_bytes()))
    CHANGES[kind](document)
    message = refused(forged, json.dumps(document))
    assert SECRET not in message
    assert "root:" not in message
    assert len(message) < LONGEST_MESSAGE


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_list_is_refused_in_a_sentence(text: str, forged: Path) -> None:
    assert len(refused(forged, text)) < LONGEST_MESSAGE


NO_STORES = [
    "ftp",
    "data",
    "dir",
    "generic",
    "local",
    "reference",
    "zip",
    "tar",
    "webhdfs",
    "github",
]
NO_STORES += ["async_wrapper", "HTTP", "FILE", "simplecache::http", "file::http", "\x1b]0;", "s3\n"]


@pytest.mark.parametrize("protocol", NO_STORES)
def test_no_other_protocol_leads_to_a_file_or_a_server(protocol: str) -> None:
    """Each is refused before anything is opened."""
    for call in (store.read_bytes, store.exists, store.info):
        with pytest.raises(ConfigError, match=r"not a stor|more than a URL"):
            call(f"{protocol}://localhost/etc/passwd")
