"""URLs that are not worth fetching: the rules of Megatron-LM's `blacklist_urls.py` (v0.7), which
OpenWebText began with.

The first rule that applies is the reason. One fault of the original is mended: a comma missing
between `.7z` and `.ai` left both in. The two lists are of that file: Copyright (c) 2020, NVIDIA
CORPORATION, Apache License 2.0, as this project's own."""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import urlsplit

DOMAIN, SUFFIX, SHORT, MALFORMED, DUPLICATE = (
    *("blacklisted_domain", "blacklisted_suffix", "short_url", "malformed_url"),
    "duplicate_url",
)
MALFORMED_WHY = "no http:// or https:// URL of a host with a name or an IPv4 address"

SHORTEST = 9

DOMAIN_NAMES = """500px aapks akamaihd amazon apple artifactfire artstation awwni bandcamp
battleforthenet coinscalendar dailymotion deviantart discord discordapp dlapkandroid dropbox e621
ebay edealinfo erome eroshare explosm facebook fbcdn flickr furaffinity futhead gatopardo gfycat
gifsound gifsoup giphy github google gunprime gyazo hotdealstar imagefap imageshack imgflip imgur
instagram karmadecay kryptocal kym-cdn liveleak livememe lmgtfy magaimg memegenerator
minorplanetcenter minus mobafire morejpeg nocookie pcpartpicker photobucket pinimg pinterest pixiv
pornhub prntscr puu qkme quickmeme radd redd reddit reddit-stream redditlog redditmedia
reddituploads redtube reupp reverb roanoke rollingstone sli soundcloud soundgasm spankbang spotify
strawpoll streamable timeanddate tinypic touhouradio tumblr twimg twitch twitter vid vimeo vine
vkaao vocaroo voyagefusion walmart wciu wikimedia wikipedia xhamster xkcd xvideos youtu youtube
youtubedoubler ytimg zillexplorer"""
DOMAINS = frozenset(DOMAIN_NAMES.split())
"""Registered domains without their public suffix."""

SUFFIX_NAMES = """3gp 7z ai aif apk app avi bin bmp bz2 css csv dat deb dmg doc docx exe gif gifv gz
iso jar jpeg jpg js log mid midi mkv mov mp3 mp4 mpeg mpg ogg ogv otf pdf pkg png pps ppt pptx psd
py qt ram rar sql svg swf tar.gz tar tgz tiff ttf txt wav webm wma wmv xls xlsx xml xz zip"""
SUFFIXES = tuple(f".{name}" for name in SUFFIX_NAMES.split())

LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.IGNORECASE | re.ASCII)
TOP = re.compile(r"[a-z0-9-]{2,}", re.IGNORECASE | re.ASCII)
IPV4 = re.compile(r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}")


def why_not(url: str) -> tuple[str, str] | None:
    """(key, message) of the reason to skip a URL; None to fetch it."""
    if (domain := registered_domain(url)) in DOMAINS:
        return DOMAIN, f"pages of {domain}"
    path = url.split("?")[0].lower()
    if path.endswith(SUFFIXES):
        return SUFFIX, f"files of type .{path.rpartition('.')[2]}"
    if len(url) < SHORTEST:
        return SHORT, f"fewer than {SHORTEST} characters"
    return (MALFORMED, MALFORMED_WHY) if is_malformed(url) else None


def is_malformed(url: str) -> bool:
    """Whether a URL does not have the form of the original's pattern: http or https, dotted labels
    or an IPv4 address, a port, and no blank."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return True
    place = min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))
    after = rest[place:]
    if any(character.isspace() for character in url) or after == "?":
        return True
    host, colon, port = rest[:place].partition(":")
    if colon and not (port.isdecimal() and port.isascii()):
        return True
    *labels, top = host.removesuffix(".").split(".")
    named = labels and all(map(LABEL.fullmatch, labels)) and TOP.fullmatch(top)
    return not (named or IPV4.fullmatch(host))


def registered_domain(url: str) -> str:
    """The registered domain without its suffix, such as `bbc` of news.bbc.co.uk; empty for none."""
    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
    return _domain_of(host)


@lru_cache(maxsize=1 << 16)
def _domain_of(host: str) -> str:
    import tld

    found = tld.get_tld(f"https://{host}/", as_object=True, fail_silently=True)
    return "" if found is None or isinstance(found, str) else found.domain
