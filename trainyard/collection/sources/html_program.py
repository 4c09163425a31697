"""The program that extracts the main text of web pages; html_reader starts it.

    argv[1]  seconds of a processor that a page may take
    stdin    for each page: its bytes (u32), those of its charset (u32), the charset, the page
    stdout   for each page: the bytes of a JSON object (u32), and the object: `text` and `title`, or
             `error`

Before the first page, the process gives up network, files and writes, and memory beyond a limit. A
page that takes too long ends the process by a signal, whatever code it is in."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import resource
import signal
import struct
import sys
from encodings.aliases import aliases
from typing import BinaryIO

import trafilatura

from trainyard.confinement import confine, leave_network

SIZES = struct.Struct("<II")
SIZE = struct.Struct("<I")

MEMORY_BYTES = 4 << 30
"""Address space beyond what the libraries take."""
REAL_SECONDS = 10
"""A page may take this many times its seconds of a processor on the clock, on a busy machine."""
FOREVER = 1 << 31

META_BYTES = 1024
META_CHARSET = re.compile(
    rb"<meta[^>]{0,200}charset=[\"' ]{0,3}([A-Za-z0-9_:.-]{1,40})", re.IGNORECASE
)
FALLBACK = "windows-1252"
"""As browsers take a page that names no charset and is not UTF-8."""

ENCODINGS = """utf_8 utf_16 utf_16_le utf_16_be ascii latin_1 cp1250 cp1251 cp1252 cp1253 cp1254
cp1255 cp1256 cp1257 cp1258 iso8859_2 iso8859_3 iso8859_4 iso8859_5 iso8859_6 iso8859_7 iso8859_8
iso8859_9 iso8859_10 iso8859_11 iso8859_13 iso8859_14 iso8859_15 iso8859_16 koi8_r koi8_u mac_roman
mac_cyrillic tis_620 gb2312 gbk gb18030 big5 big5hkscs euc_jp shift_jis cp932 iso2022_jp euc_kr
cp949"""
"""What a page may name as its charset, by Python's names; loaded before the process is confined."""
MODULES = frozenset(ENCODINGS.split())
CHARSETS = MODULES | {alias for alias, name in aliases.items() if name in MODULES}

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


def decode(page: bytes, charset: str) -> str:
    """The page as text: by its header, its <meta>, as UTF-8, or as Windows-1252."""
    meta = META_CHARSET.search(page, 0, META_BYTES)
    for name in (charset, meta[1].decode() if meta else "", "utf-8"):
        known = name.strip().lower().replace("-", "_")
        if known in CHARSETS:
            with contextlib.suppress(UnicodeError):
                return page.decode(known)
    return page.decode(FALLBACK, "replace")


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
    """Bytes that are taken now; 0 where nothing tells."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
