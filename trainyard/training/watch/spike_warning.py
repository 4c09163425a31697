"""Warns about loss spikes."""

from __future__ import annotations

import logging

from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.loop.rerun import SpikeDetector

log = logging.getLogger(__name__)


class SpikeWarning(Callback):
    """On rank 0."""

    def __init__(self) -> None:
        self.num_spikes = 0
        self._detector = SpikeDetector()

    def after_step(self, event: StepEvent) -> None:
        """Compare the loss with those before."""
        loss, record = event.record.lm_loss, event.record
        if event.timing is None or loss is None or record.skipped:
            return
        bound = self._detector.bound()
        if self._detector.is_spike(loss):
            self.num_spikes += 1
            log.warning(
                "loss spike step=%d loss=%.6g bound=%.6g; stages.blame shows the documents of the "
                "step",
                *(record.step, loss, bound),
            )
        self._detector.add(loss)
