"""Train as a stage: what the library does (`trainyard.training.pretraining`), in the run folder
that the stage keeps."""

from __future__ import annotations

import signal
from typing import Any

from stages.context import StageRun
from stages.pretrain.config import PretrainConfig
from stages.pretrain.convert import convert
from stages.pretrain.folder import StageHost
from stages.pretrain.heartbeat import heartbeats
from trainyard.errors import Stopped
from trainyard.training.parts import Parts
from trainyard.training.prepare import prepared
from trainyard.training.pretraining import Pretraining


def run(config: PretrainConfig, stage: StageRun) -> dict[str, Any]:
    """Train this rank's share; returns metrics. Or convert a checkpoint, and train nothing."""
    if config.ckpt_convert_format is not None:
        return convert(config, stage)
    with prepared(config) as (groups, device):
        host = StageHost(stage, config.verify_checkpoint)
        parts = Parts(callbacks=heartbeats(groups.rank))
        result = Pretraining(config, host, groups, device, parts).run()
        if result.outcome == "finished":
            return result.metrics
        if stage.stop_requested:
            stage.stop()
        by = "--exit-interval" if result.outcome == "paused" else "--exit-duration-in-mins"
        raise Stopped(signal.SIGTERM, by)
