"""A stage for tests of the contract: upper-cases a text file, a line a unit of work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.runtime.cli import stage_main
from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.artifacts.output import Output
from trainyard.config import execution, location
from trainyard.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyConfig:
    """Upper-case a text file."""

    input: str = location()
    """The text."""
    output_dir: str = location()
    """Where to."""
    suffix: str = ""
    """Appended to every line."""
    seconds: float = execution(0.0)
    """How long each line takes."""
    gate: str = execution("")
    """After the first line, wait until this file exists."""
    fail: str = execution("")
    """How to fail."""

    def __post_init__(self) -> None:
        """Rules."""
        if self.suffix == "no":
            raise ConfigError("--suffix cannot be 'no'; leave it out")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The text."""
        return {"input": (self.input,)}

    def output(self) -> Output:
        """A folder."""
        return Output.directory(self.output_dir)


def run(config: ToyConfig, stage: StageRun) -> dict[str, Any]:
    """Each line is a unit; the parts are then joined."""
    (url,) = stage.inputs["input"].files
    lines = store.read_bytes(url).decode().splitlines()
    done_before = 0
    for number, line in enumerate(lines):
        if config.fail == "data":
            raise DataError(f"{url}: line {number + 1} is bad")
        if config.fail == "defect":
            raise ZeroDivisionError("a defect")
        if stage.work.published(str(number)) is not None:
            done_before += 1
            continue
        time.sleep(config.seconds)
        with stage.work.open(f"{number}.txt") as part:
            part.write((line.upper() + config.suffix + "\n").encode())
        stage.work.publish(str(number), {"characters": len(line)})
        while config.gate and not Path(config.gate).exists():
            time.sleep(0.02)
    with stage.open("upper.txt") as file:
        for number in range(len(lines)):
            file.write(store.read_bytes(stage.work.url(f"{number}.txt")))
    stage.write_json("timing.json", {"now": time.time()}, volatile=True)
    return {"lines": len(lines), "done_before": done_before}


if __name__ == "__main__":
    raise SystemExit(stage_main("toy", ToyConfig, "tests.stages.toy"))
