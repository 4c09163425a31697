"""The program that extracts the main text of web pages; html_reader starts it.

    argv[1]  seconds of a processor that a page may take
    stdin    for each page: its bytes (u32), those of its charset (u32), the charset, the page
    stdout   for each page: the bytes of a JSON object (u32), and the object: `text` and `title`, or
             `error`

Before the first page, the process gives up network, files and writes, and memory beyond a limit. A
page that takes too long ends the process by a signal, whatever code it is in."""

from __future__ import annotations

import codecs
import json
import resource
import signal
import sys
from typing import BinaryIO

import trafilatura

from trainyard.collection.sources.charsets import MODULES, decode
from trainyard.collection.sources.html_protocol import SIZE, SIZES
from trainyard.confinement import confine, leave_network

MEMORY_BYTES = 4 << 30
"""Address space beyond what the libraries take."""
REAL_SECONDS = 10
"""A page may take this many times its seconds of a processor on the clock, on a busy machine."""
FOREVER = 1 << 31

WARM = "<html><head><title>a</title></head><body><p>{}</p></body></html>"
"""Two pages: one with a text, and one in which Trafilatura looks with all that it has."""


def extract(page: bytes, charset: str) -> dict[str, str]:
    """The title and the main text of a page, as Trafilatura finds it: without comments."""
    tree = trafilatura.load_html(decode(page, charset))
    if tree is None:
        return {"text": "", "title": ""}
    title = " ".join((tree.findtext(".//title") or "").split())
    found = trafilatura.bare_extraction(tree, include_comments=False)
    text = "" if found is None or isinstance(found, dict) else found.text or ""
    return {"text": text.strip(), "title": title}


def main() -> None:
    """Answer until the input ends."""
    seconds = float(sys.argv[1])
    for name in MODULES:
        codecs.lookup(name)
    for words in ("Some words of a page that is no page. " * 40, "a"):
        extract(WARM.format(words).encode(), "")
    leave_network()
    confine(_address_space() + MEMORY_BYTES, FOREVER)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while sizes := source.read(SIZES.size):
        page_bytes, charset_bytes = SIZES.unpack(sizes)
        charset = source.read(charset_bytes).decode("utf-8", "replace")
        page = source.read(page_bytes)
        _set_alarms(seconds)
        answer = _answer(page, charset)
        _set_alarms(0)
        _write(sink, answer)


def _answer(page: bytes, charset: str) -> dict[str, str]:
    try:
        return extract(page, charset)
    except Exception as error:  # of any library on any page; the page is reported as dropped
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def _write(sink: BinaryIO, answer: dict[str, str]) -> None:
    data = json.dumps(answer).encode()
    sink.write(SIZE.pack(len(data)) + data)
    sink.flush()


def _set_alarms(seconds: float) -> None:
    """The signals of both timers end the process, since nothing handles them."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * REAL_SECONDS)


def _address_space() -> int:
    """Memory of this process in bytes; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
