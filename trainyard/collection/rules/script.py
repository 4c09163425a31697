"""The rule about the writing system of a text, by Unicode's property Script (UAX 24), as FineWeb-2
sorts pages by language and script (arXiv:2506.20920)."""

from __future__ import annotations

from functools import cache
from typing import Any

from trainyard.collection.rules.page import Drop, Page, Verdict
from trainyard.errors import ConfigError

SEPARATOR = "+"


def script(page: Page, keep: str = "Latin", min: float = 0.65, chars: int = 2000) -> Verdict:
    """Keeps texts of which a share of `min` of the letters is in one of the scripts of `keep`, such
    as Latin+Cyrillic; looks at the first `chars` characters."""
    text = page.text[:chars]
    letters = len(_letters(None).findall(text))
    if not letters:
        return Drop("no letter")
    share = len(_letters(keep).findall(text)) / letters
    return None if share >= min else Drop(f"{share:.0%} {keep}")


@cache
def _letters(keep: str | None) -> Any:
    """What matches a letter, or one of the given scripts."""
    import regex

    names = [] if keep is None else keep.split(SEPARATOR)
    scripts = "".join(rf"\p{{Script={name}}}" for name in names)
    return regex.compile(rf"(?V1)[\p{{L}}&&[{scripts}]]" if scripts else r"\p{L}")


def check_scripts(keep: str) -> None:
    """Refuse a script that Unicode does not have."""
    import regex

    for name in keep.split(SEPARATOR):
        try:
            known = name.replace("_", "").isalnum() and _letters(name) is not None
        except regex.error:
            known = False
        if not known:
            raise ConfigError(
                f"--rules: keep={keep}: Unicode has no script {name!r}; its scripts have names "
                f"such as Latin, Cyrillic, Han, Devanagari; join several with {SEPARATOR}"
            )
