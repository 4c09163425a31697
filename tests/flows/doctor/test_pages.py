"""What the operator's page says is so: messages, flags, sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flows.doctor.check import PAGE
from flows.doctor.command import CHECKS
from flows.gc.command import _parser as gc_parser
from flows.stage_configs import CONFIGS
from stages.runtime.common_options import CommonOptions
from trainyard.config import leaves, other_names

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / PAGE).read_text()

OF_OTHERS = {"--shm-size", "--start", "--submit", "--root", "--only", "--json", "--yard"}
OF_OTHERS |= {"--debug", "--dry-run", "--profile"}
ELSEWHERE = ("Bus error", "nvidia-smi", "Driver/library", "[Errno 28]", "RequestTimeTooSkewed")
ELSEWHERE += ("database is locked",)
"""What other programs say."""


def sources() -> str:
    """Every source, with texts that stand in pieces on several lines put together."""
    files = [p for name in ("trainyard", "stages", "flows") for p in (ROOT / name).rglob("*.py")]
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r"\"\s*\n\s*f?\"", "", text)


def messages() -> list[str]:
    """The first thing in backticks of each row of a table of what you see."""
    found = []
    for table in re.split(r"\n\n", TEXT):
        lines = table.splitlines()
        if lines and lines[0].startswith("|") and "you see" in lines[0]:
            column = [cell.strip() for cell in lines[0].split("|")].index("you see")
            for line in lines[2:]:
                cell = re.sub(r"`[^`]*`", lambda m: m[0].replace("|", "!"), line).split("|")[column]
                found += re.findall(r"`([^`]+)`", cell)[:1]
    return found


def pieces(message: str) -> list[str]:
    """The fixed parts of a message."""
    return [piece.strip(" ():;,") for piece in message.split("...") if len(piece.strip()) > 6]


@pytest.mark.parametrize("section", sorted({check.section for check in CHECKS}))
def test_every_check_has_its_section(section: str) -> None:
    headings = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    assert section in {heading.lower().replace(" ", "-") for heading in headings}


def test_messages_are_those_of_the_code() -> None:
    text = sources()
    found = [m for m in messages() if not m.startswith(ELSEWHERE)]
    assert len(found) > 35
    assert [m for m in found if not all(piece in text for piece in pieces(m))] == []


def test_flags_are_flags() -> None:
    known = {name for config in CONFIGS.values() for name, _, _ in leaves(config)}
    known |= {name for config in CONFIGS.values() for name in other_names(config)}
    known |= set(CommonOptions.__dataclass_fields__)
    flags = {"--" + name.replace("_", "-") for name in known} | OF_OTHERS
    spoken = set(re.findall(r"`(--[a-z][a-z-]+)", TEXT))
    assert len(spoken) > 20
    assert spoken - flags == set()


def test_the_table_of_the_sweep_has_every_flag_of_its_policy() -> None:
    page = (ROOT / "docs/gc.md").read_text()
    known = {option for action in gc_parser()._actions for option in action.option_strings}
    spoken = set(re.findall(r"`(--[a-z][a-z-]+)", page))
    assert spoken <= known
    shared = {"--profile", "--yard", "--root"}
    assert known - spoken <= {"--help", "-h", "--json", "--dry-run"} | shared
