"""What a robots.txt allows. Source: RFC 9309, and the delay that many files ask for.

Matching takes time linear in pattern and path, whoever wrote them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote, urlsplit

MAX_BYTES = 512 * 1024
"""Of a robots.txt that are read; RFC 9309 asks for at least 500 KiB."""
MAX_RULES = 5000
MAX_DELAY_SECONDS = 60.0
"""Longest delay that a site may ask for."""


class Rule(NamedTuple):
    """A line that allows or disallows."""

    pattern: str
    allows: bool

    def matches(self, path: str) -> bool:
        """Whether the pattern, in which * is any text and $ at the end the end, fits the path."""
        anchored = self.pattern.endswith("$")
        first, *rest = self.pattern.removesuffix("$").split("*")
        if not path.startswith(first):
            return False
        if not rest:
            return not anchored or len(path) == len(first)
        at = len(first)
        for part in rest[:-1]:
            found = path.find(part, at)
            if found < 0:
                return False
            at = found + len(part)
        last = rest[-1]
        if anchored:
            return len(path) - len(last) >= at and path.endswith(last)
        return path.find(last, at) >= 0


@dataclass(frozen=True, slots=True)
class Robots:
    """The rules of a site for one agent."""

    rules: tuple[Rule, ...] = ()
    delay_seconds: float = 0.0

    def allows(self, url: str) -> bool:
        """The longest pattern that fits decides, of equals one that allows."""
        parts = urlsplit(url)
        path = _normal((parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
        fitting = [rule for rule in self.rules if rule.matches(path)]
        if not fitting:
            return True
        return max(fitting, key=lambda rule: (len(rule.pattern), rule.allows)).allows


ALLOW_ALL = Robots()
ALLOW_NONE = Robots((Rule("/", False),))


@dataclass(slots=True)
class _Group:
    agents: list[str] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    delay_seconds: float = 0.0
    has_rules: bool = False


def parse_robots(data: bytes, user_agent: str) -> Robots:
    """The rules for an agent: of all groups with its name, or else of those of *."""
    groups: list[_Group] = []
    for line in data[:MAX_BYTES].decode("utf-8", "replace").removeprefix("\ufeff").splitlines():
        key, colon, value = line.partition("#")[0].partition(":")
        key, value = key.strip().lower(), value.strip()
        if not colon:
            continue
        if key == "user-agent":
            if not groups or groups[-1].has_rules:
                groups.append(_Group())
            groups[-1].agents.append(value.lower())
        elif groups:
            _add(groups[-1], key, value)
    name = user_agent.partition("/")[0].strip().lower()
    mine = [group for group in groups if name in group.agents]
    mine = mine or [group for group in groups if "*" in group.agents]
    rules = [rule for group in mine for rule in group.rules]
    delay = max((group.delay_seconds for group in mine), default=0.0)
    return Robots(tuple(rules[:MAX_RULES]), min(delay, MAX_DELAY_SECONDS))


def _add(group: _Group, key: str, value: str) -> None:
    if key in ("allow", "disallow"):
        group.has_rules = True
        if value:
            group.rules.append(Rule(_normal(value), key == "allow"))
    elif key == "crawl-delay":
        group.has_rules = True
        if value.replace(".", "", 1).isdecimal() and value.isascii():
            group.delay_seconds = float(value)


def _normal(path: str) -> str:
    """With every character that is not of ASCII, or no part of a path, escaped; the escapes in
    upper case."""
    parts = path.split("%")
    fixed = [parts[0], *(part[:2].upper() + part[2:] for part in parts[1:])]
    return quote("%".join(fixed), safe="/%*$?&=:@!'()+,;~-._#[]")
