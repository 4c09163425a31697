"""What a pretraining asks of whoever runs it: a stage of the yard, or a program that calls the
library (`pretrain`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trainyard.checkpoint.background import SaveReport
from trainyard.errors import InfrastructureError
from trainyard.training.run.run_steps import FoundSteps


class RunFolder(Protocol):
    """Keeps the run folder in order; on rank 0 alone."""

    @property
    def found(self) -> FoundSteps:
        """The steps that are there, as this run may use them."""

    def make_room(self) -> None:
        """Before the first save: other runs' steps are set aside, torn ones go."""

    def keep_timings(self, step: int, lines: list[str]) -> None:
        """Timings up to a step, kept over kills."""

    def keep_save(self, report: SaveReport) -> None:
        """What a save cost, kept over kills; called in any thread."""

    def remembered(self, key: str) -> dict[str, Any] | None:
        """What an earlier, unfinished attempt at this run left under a name."""

    def remember(self, key: str, document: Mapping[str, Any]) -> None:
        """Leave something for the next attempt."""

    def write_volatile(self, name: str, document: Any) -> None:
        """Write a JSON document beside the checkpoints that is no part of what the run makes."""

    def write_unfinished(self, name: str, document: Any) -> bool:
        """Write such a document of a run that was stopped or failed, before it has a manifest;
        False, and nothing done, while that of a finished run stands there, which lists its own."""

    def finish(self) -> bytes:
        """List every step that stays, write the whole ledger; returns it."""


class RunHost(Protocol):
    """Where a run runs; on every rank."""

    @property
    def name(self) -> str:
        """Of the stage, for manifests."""

    @property
    def lineage(self) -> str:
        """Digest of configuration and inputs: what may be continued."""

    @property
    def input_digests(self) -> Mapping[str, str]:
        """Of each input by its name."""

    @property
    def stop_requested(self) -> bool:
        """A signal asked the run to save and stop."""

    def defer_signals(self) -> None:
        """From here on a first signal only sets `stop_requested`."""

    def keeper(self) -> RunFolder:
        """Asked for once, on rank 0, before anything is built on the device."""

    def end_process(self, error: InfrastructureError) -> None:
        """End this process at once, which hangs or waits for ranks that hang."""
