"""Train as a stage: what the library does (`trainyard.training.trainer`), in the run folder
that the stage keeps."""

from __future__ import annotations

import signal
from typing import Any

from stages.pretrain.config import PretrainConfig
from stages.pretrain.convert import convert
from stages.pretrain.folder import StageHost
from stages.pretrain.heartbeat import heartbeats
from stages.pretrain.reached import Reached
from stages.runtime.context import StageRun
from stages.runtime.failure import add_step
from trainyard.errors import Stopped, StoppedByOption
from trainyard.training.loop.prepare import prepared
from trainyard.training.overrides import Overrides
from trainyard.training.trainer import Result, Trainer


def run(config: PretrainConfig, stage: StageRun) -> dict[str, Any]:
    """Train this rank's share; returns metrics. Or convert a checkpoint, and train nothing."""
    if config.ckpt_convert_format is not None:
        return convert(config, stage)
    reached = Reached(stage.step_file)
    try:
        with prepared(config) as (groups, device):
            host = StageHost(stage, config.verify_checkpoint, reached)
            parts = Overrides(callbacks=(*heartbeats(groups.rank), reached))
            return _metrics(Trainer(config, host, groups, device, parts).run(), stage)
    except BaseException as error:
        add_step(error, reached.step)
        raise


def _metrics(result: Result, stage: StageRun) -> dict[str, Any]:
    """Of a training that is finished; raises Stopped for another one."""
    if result.outcome == "finished":
        return result.metrics
    if stage.stop_requested:
        stage.stop()
    if result.stopped_by.startswith("--"):
        raise StoppedByOption(result.stopped_by)
    raise Stopped(signal.SIGTERM, result.stopped_by)
