"""The text of a web page: by the charset that it names, if that is one of text, as browsers do."""

from __future__ import annotations

import contextlib
import re
from encodings.aliases import aliases

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


def decode(page: bytes, charset: str) -> str:
    """The page as text: by its header, its <meta>, as UTF-8, or as Windows-1252."""
    meta = META_CHARSET.search(page, 0, META_BYTES)
    for name in (charset, meta[1].decode() if meta else "", "utf-8"):
        known = name.strip().lower().replace("-", "_")
        if known in CHARSETS:
            with contextlib.suppress(UnicodeError):
                return page.decode(known)
    return page.decode(FALLBACK, "replace")
