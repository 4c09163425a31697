"""Rules that mask personal data by a word for its kind.

Patterns, so some of it stays, and a number that looks like a telephone number goes."""

from __future__ import annotations

import ipaddress
import re

from trainyard.collection.rules.page import Page, Verdict, edited

EMAIL = re.compile(
    r"(?<![\w.+-])[A-Za-z0-9][\w.+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])",
    re.ASCII,
)
IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
PHONE = re.compile(
    r"(?<![\w.+-])(?:\+\d{1,3}[ .-]?)?(?:\(\d{2,4}\)[ ]?|\d{2,4}[ .-])\d{3,4}[ .-]\d{3,4}(?![\w-])"
)
MASKS = {"emails": "<EMAIL>", "ips": "<IP>", "phones": "<PHONE>"}


def mask_emails(page: Page) -> Verdict:
    """Puts <EMAIL> for addresses of electronic mail."""
    if "@" not in page.text:
        return None
    return edited(page, EMAIL.sub(MASKS["emails"], page.text))


def mask_ips(page: Page) -> Verdict:
    """Puts <IP> for public IPv4 addresses, as FineWeb does; private ones say nothing of anyone."""
    return edited(page, IPV4.sub(_masked, page.text))


def _masked(found: re.Match[str]) -> str:
    try:
        is_public = ipaddress.IPv4Address(found[0]).is_global
    except ValueError:  # 300.1.2.3, or 01.2.3.4
        return found[0]
    return MASKS["ips"] if is_public else found[0]


def mask_phones(page: Page) -> Verdict:
    """Puts <PHONE> for telephone numbers that are written in groups."""
    return edited(page, PHONE.sub(MASKS["phones"], page.text))
