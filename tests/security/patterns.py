"""Every regular expression of the sources, and texts that make a bad one slow.

Collected from the syntax trees, so that nothing is imported: a pattern may be a literal, or made of
constants of its own module and of others of the project."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

ROOT = Path(__file__).parents[2]
FLOORS = ("flows", "stages", "trainyard")
CALLS = ("compile", "match", "search", "sub", "subn", "fullmatch", "split", "finditer", "findall")

Text = str | bytes


@dataclass(frozen=True)
class Found:
    """A regular expression in the sources."""

    where: str
    """File and line."""
    pattern: Text | None
    """None: it is made at run time."""
    flags: int
    methods: tuple[str, ...]
    """What it is used for: match, fullmatch, search."""

    @property
    def file(self) -> str:
        return self.where.rpartition(":")[0]


@cache
def sources() -> dict[Path, str]:
    """The text of every file of the project, in order."""
    paths = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
    return {path: path.read_text() for path in paths}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(sources()[path])


@cache
def constants_of(path: Path) -> dict[str, Any]:
    """What the names at the top of a module stand for, where that can be evaluated."""
    known: dict[str, Any] = {"re": re, "frozenset": frozenset}
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FLOORS:
            source = ROOT / (str(node.module).replace(".", "/") + ".py")
            has_constants = any(a.name.isupper() for a in node.names)
            if has_constants and source in sources() and source != path:
                theirs = constants_of(source)
                known |= {
                    a.asname or a.name: theirs[a.name] for a in node.names if a.name in theirs
                }
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = evaluated(node.value, known)
            if value is not None and isinstance(targets[0], ast.Name):
                known[targets[0].id] = value
    return known


def evaluated(node: ast.expr, known: dict[str, Any]) -> Any:
    """The value of an expression of constants; None if it has others."""
    if any(isinstance(one, ast.Lambda | ast.Await | ast.Yield) for one in ast.walk(node)):
        return None
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    bound = {one.target.id for one in ast.walk(node) if isinstance(one, ast.comprehension)
             and isinstance(one.target, ast.Name)}  # fmt: skip
    if not names - bound <= known.keys() | {"map", "sorted", "chr", "range", "str", "len"}:
        return None
    try:
        return eval(compile(ast.Expression(node), "constants", "eval"), dict(known))
    except Exception:
        return None


def patterns() -> Iterator[Found]:
    """All of them, in the order of the files."""
    for path, text in sources().items():
        if not re.search(r"\bre\.", text):
            continue
        known = constants_of(path)
        for node in ast.walk(tree_of(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner, method = node.func.value, node.func.attr
            if not (isinstance(owner, ast.Name) and owner.id == "re" and method in CALLS):
                continue
            pattern = evaluated(node.args[0], known)
            flags = evaluated(flags_of(node, method), known) or 0
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            methods = uses(path, node) if method == "compile" else (method,)
            kept = pattern if isinstance(pattern, str | bytes) else None
            yield Found(where, kept, int(flags), methods)


def flags_of(call: ast.Call, method: str) -> ast.expr:
    given = {k.arg: k.value for k in call.keywords}
    place = 1 if method == "compile" else 3 if method in ("sub", "subn", "split") else 2
    if "flags" in given:
        return given["flags"]
    return call.args[place] if len(call.args) > place else ast.Constant(0)


def uses(path: Path, call: ast.Call) -> tuple[str, ...]:
    """The methods called of a compiled pattern by its name; all where it has none."""
    everything = ("match", "fullmatch", "search")
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and node.value is call:
            name = node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
            break
    else:
        return everything
    found = set()
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for other, text in sources().items():
        if other != path and f"from {module} import" not in text:
            continue
        found |= set(re.findall(rf"\b{name}\.(\w+)", text)) & set(CALLS)
        if other != path and re.search(rf"{module.rpartition('.')[2]}\.{name}\b", text):
            return everything
    return tuple(sorted(found)) or everything


# --- texts that take long -------------------------------------------------------------------------

POOL = "0a_Z.-:/ \t\n\"'<>|%@=,()[]{}\\\x1b\0\xe9\u4e00"
"""One of each class of characters."""

REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
MANY = 1000


def example(sequence: Any) -> str:
    """A short text that a parsed pattern matches, near enough."""
    return "".join(map(_example, sequence))


def _example(item: Any) -> str:
    kind, value = item
    if kind is kinds.LITERAL:
        return chr(value)
    if kind in (kinds.NOT_LITERAL, kinds.IN, kinds.ANY):
        return next(iter(matching(item)), "x")
    if kind in REPEATS:
        least, _, inner = value
        return example(inner) * min(least, 20)
    if kind is kinds.SUBPATTERN:
        return example(value[-1])
    if kind is kinds.ATOMIC_GROUP:
        return example(value)
    if kind is kinds.BRANCH:
        return example(value[1][0])
    return ""


def matching(item: Any) -> list[str]:
    """Characters of the pool, and those written out, that one item matches."""
    kind, value = item
    if kind is kinds.IN:
        written = [chr(v if k is kinds.LITERAL else v[0]) for k, v in value
                   if k in (kinds.LITERAL, kinds.RANGE)]  # fmt: skip
        negated = value[0][0] is kinds.NEGATE
        inside = [one for one in POOL if any(_has(part, one) for part in value)]
        return [one for one in POOL if one not in inside] if negated else [*inside, *written[:2]]
    if kind is kinds.LITERAL:
        return [chr(value)]
    if kind is kinds.NOT_LITERAL:
        return [one for one in POOL if one != chr(value)]
    return list(POOL) if kind is kinds.ANY else []


def _has(part: Any, character: str) -> bool:
    kind, value = part
    if kind is kinds.LITERAL:
        return chr(value) == character
    if kind is kinds.RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    if kind is kinds.CATEGORY:
        classes = {kinds.CATEGORY_DIGIT: r"\d", kinds.CATEGORY_SPACE: r"\s",
                   kinds.CATEGORY_WORD: r"\w", kinds.CATEGORY_NOT_DIGIT: r"\D",
                   kinds.CATEGORY_NOT_SPACE: r"\S", kinds.CATEGORY_NOT_WORD: r"\W"}  # fmt: skip
        return re.fullmatch(classes[value], character) is not None
    return False


def repeats(sequence: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every part that may repeat without end, with a text that leads to it."""
    for item in sequence:
        kind, value = item
        if kind in REPEATS:
            if value[1] is kinds.MAXREPEAT or value[1] >= MANY:
                yield before, value[2]
            yield from repeats(value[2], before)
        elif kind is kinds.SUBPATTERN:
            yield from repeats(value[-1], before)
        elif kind is kinds.ATOMIC_GROUP:
            yield from repeats(value, before)
        elif kind is kinds.BRANCH:
            for branch in value[1]:
                yield from repeats(branch, before)
        before += _example(item)


def attacks(pattern: Text, flags: int) -> Iterator[tuple[str, str, str]]:
    """Texts that may take long: (beginning, what is repeated, end)."""
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    parsed = parser.parse(text, flags)
    seen = {("", one, "") for one in POOL}
    whole = example(parsed)
    seen |= {("", whole, ""), ("", whole[: max(1, len(whole) - 1)], "")}
    for before, inner in repeats(parsed):
        units = {example(inner), *itertools.chain.from_iterable(map(matching, inner))}
        for unit in filter(None, units):
            seen |= {(before, unit, ""), (before, unit, "\0"), ("", before + unit, "\0")}
            seen |= {(before, unit + other, "\0") for other in units if other != unit and
                     len(units) < 6}  # fmt: skip
    yield from sorted(one for one in seen if one[1])
