"""Figures of a benchmark with what they depend on: command, versions, commit, GPUs.

Each figure is told on stderr and put into the file of --json as soon as it is known, so a call that
is cut off keeps what it measured."""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

Figures: TypeAlias = Mapping[str, float]

PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "flash-attn-4", "trainyard")
LIMITS = (
    *("name", "driver_version", "power.limit", "enforced.power.limit"),
    *("clocks.max.sm", "clocks.max.mem", "persistence_mode"),
)
"""What a GPU is and is allowed, as nvidia-smi names it."""
STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
"""What a GPU does while it computes."""
QUERY_SECONDS = 10
NUMBER = re.compile(r"\d+(\.\d+)?")


def query_gpus(names: tuple[str, ...]) -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU, with units; nothing where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_SECONDS)
    except subprocess.TimeoutExpired:
        return []
    if done.returncode:
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def gpu_state() -> dict[str, float]:
    """Clocks (MHz), power (W) and temperature of the first GPU now; nothing without one, and where
    CUDA_VISIBLE_DEVICES makes another one the first."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] != "0":
        return {}
    first = next(iter(query_gpus(STATE)), {})
    words = {name: value.split()[0] for name, value in first.items() if value}
    return {name: float(word) for name, word in words.items() if NUMBER.fullmatch(word)}


def versions() -> dict[str, str]:
    """Of Python and of the packages that are there."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit(folder: Path) -> str | None:
    """The commit of a checkout, with `-dirty` for changes; None outside of one."""
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    words += ["--exclude", "*"]
    if shutil.which("git") is None:
        return None
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def plain_number(value: Any) -> Any:
    """A value as JSON has it: numbers that are none become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Record:
    """All figures of one call."""

    def __init__(self, path: Path | None) -> None:
        """path: of the JSON file; None: only stderr."""
        self._path = path
        self._document: dict[str, Any] = {
            "command": shlex.join(sys.orig_argv),
            "commit": commit(Path(__file__).parent),
            "versions": versions(),
            "gpus": query_gpus(LIMITS),
            "figures": [],
        }
        self._write()

    def add(self, who: str, text: str, facts: Mapping[str, Any]) -> None:
        """Tell and keep one measurement. who: what was measured; facts: its JSON."""
        print(f"{who}: {text}", file=sys.stderr, flush=True)
        figures = {name: plain_number(value) for name, value in facts.items()}
        self._document["figures"].append({"of": who, **figures})
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_name(f"{self._path.name}.part")
            part.write_text(json.dumps(self._document, indent=1) + "\n")
            os.replace(part, self._path)
