"""What Prefect's pages show of a flow run: progress, a table of its stages, a link to its card."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.artifacts import (
    acreate_link_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    aupdate_progress_artifact,
)

from trainyard.artifacts.urls import local_path

if TYPE_CHECKING:
    from flows.stage_task import Summary

SHOWN_METRICS = 4


class Board:
    """Grows as stages end; the table and the link are made at the end of the run."""

    def __init__(self, flow: str, num_jobs: int, card: str = "") -> None:
        self.summaries: list[Summary] = []
        self._flow = flow
        self._num_jobs = num_jobs
        self._card = card
        self._progress: UUID | None = None

    async def open(self) -> None:
        """Begin, at 0 %."""
        key = f"{self._flow}-progress"
        created: Any = await acreate_progress_artifact(0.0, key=key, description="Stages done")
        self._progress = created

    async def add(self, summary: Summary) -> None:
        """A stage ended well."""
        self.summaries.append(summary)
        if self._progress is not None:
            share = 100.0 * len(self.summaries) / max(self._num_jobs, 1)
            await aupdate_progress_artifact(self._progress, progress=share)

    async def close(self, error: BaseException | None) -> None:
        """The run has ended."""
        table = stage_table(self.summaries)
        if error is not None:
            table += f"\n\n**Stopped:** {_cell(str(error))}\n"
        await acreate_markdown_artifact(table, key=f"{self._flow}-stages", description="Stages")
        if self._card and error is None:
            await acreate_link_artifact(
                link_to(self._card),
                link_text="run card",
                key=f"{self._flow}-card",
                description=f"The run card: `{self._card}`",
            )


async def show_script(job: str, script: str) -> None:
    """What was submitted for a job, to be read and run again by hand."""
    key = re.sub(r"[^a-z0-9]+", "-", job) + "-script"
    await acreate_markdown_artifact(f"```bash\n{script}```\n", key=key, description="Submitted")


def link_to(url: str) -> str:
    """The URL that a browser opens."""
    path = local_path(url)
    return url if path is None else path.absolute().as_uri()


def stage_table(summaries: Sequence[Summary]) -> str:
    """A markdown table: stage, state, seconds, output digest, why it ran, metrics."""
    lines = ["| stage | state | seconds | output digest | why it ran | metrics |"]
    lines.append("| --- | --- | ---: | --- | --- | --- |")
    for summary in summaries:
        cells = (
            f"`{summary.job}`",
            "reused" if summary.reused else "done",
            f"{summary.seconds:.1f}",
            f"`{summary.output_digest[:12]}`" if summary.output_digest else "",
            _cell(summary.reason),
            _cell(metrics_text(summary.metrics)),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def metrics_text(metrics: dict[str, Any]) -> str:
    """The first few metrics that are numbers."""
    numbers = {
        key: value
        for key, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    shown = list(numbers.items())[:SHOWN_METRICS]
    return ", ".join(f"{key} {_number(value)}" for key, value in shown)


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
