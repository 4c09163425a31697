"""The environment that a pretraining runs in: a stage, or a program that calls `pretrain`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from trainyard.errors import InfrastructureError
from trainyard.training.run.run_folder import RunFolder


class RunHost(Protocol):
    """The interface of the environment, on every rank."""

    @property
    def name(self) -> str:
        """Name of the stage, for manifests."""

    @property
    def lineage(self) -> str:
        """Digest of configuration and inputs: steps with the same one belong to this run."""

    @property
    def input_digests(self) -> Mapping[str, str]:
        """Digest of each input by its name."""

    @property
    def stop_requested(self) -> bool:
        """True after a signal that asks the run to save and stop."""

    def defer_signals(self) -> None:
        """From now on the first signal only sets `stop_requested`."""

    def run_folder(self) -> RunFolder:
        """Open the run folder; called once, on rank 0, before anything is built on the device."""

    def end_process(self, error: InfrastructureError) -> None:
        """End this process at once: it hangs, or it waits for ranks that hang."""
