"""Runs `trainyard.training.trainer` in the run folder of the stage."""

from __future__ import annotations

import logging
import signal
from dataclasses import replace
from typing import Any

from stages.pretrain.classify_config import ClassifyConfig
from stages.pretrain.config import PretrainConfig
from stages.pretrain.convert import convert
from stages.pretrain.folder import StageHost
from stages.pretrain.heartbeat import heartbeats
from stages.pretrain.progress_file import ProgressFile
from stages.runtime.context import StageRun
from stages.runtime.failure import add_step
from trainyard.errors import Stopped, StoppedByOption
from trainyard.training.loop.prepare import prepared
from trainyard.training.overrides import Overrides
from trainyard.training.result import Result
from trainyard.training.run.segments import segments_document, segments_of_step
from trainyard.training.trainer import Trainer

log = logging.getLogger(__name__)


def run(config: PretrainConfig, stage: StageRun) -> dict[str, Any]:
    """Train on this rank, or only convert a checkpoint; returns metrics. Raises Stopped if the run
    stops before its last step."""
    if config.ckpt_convert_format is not None:
        return convert(config, stage)
    progress = ProgressFile(stage.step_file)
    result: Result | None = None
    try:
        with prepared(config) as (groups, device):
            host = StageHost(stage, config, progress)
            callbacks = (*heartbeats(groups.rank), progress)
            overrides, accuracy = Overrides(callbacks=callbacks), None
            if isinstance(config, ClassifyConfig):
                from stages.pretrain.classify import classifier_overrides  # others do without

                parts, accuracy = classifier_overrides(config, stage, groups, device)
                overrides = replace(parts, callbacks=(*callbacks, *parts.callbacks))
            result = Trainer(config, host, groups, device, overrides).run()
            if result.outcome == "finished":
                if stage.is_main and config.save is not None:
                    segments = segments_of_step(config.save, result.state.step)
                    stage.facts.update(segments_document(segments))
                elif stage.is_main:
                    log.info("finished, nothing is kept: %s", result.metrics)
                if accuracy is None:
                    return result.metrics
                assert isinstance(config, ClassifyConfig)
                from stages.pretrain.classify import classifier_metrics, write_results

                if stage.is_main and config.save is not None:
                    write_results(config, stage, accuracy)
                return {**result.metrics, **classifier_metrics(accuracy)}
            if stage.stop_requested:
                stage.stop()
            if result.stopped_by.startswith("--"):
                raise StoppedByOption(result.stopped_by)
            raise Stopped(signal.SIGTERM, result.stopped_by)
    except Stopped as stopped:
        if result is not None and progress.step and config.save is not None:
            stopped.saved = f"step {progress.step} is saved; run the same command to resume"
        add_step(stopped, progress.step)
        raise
    except BaseException as error:
        add_step(error, progress.step)
        raise
