"""Stream the tensors of one step into other files."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from stages.context import StageRun
from stages.reshard.config import ReshardConfig
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import join
from trainyard.checkpoint.foreign.hf_config import architecture
from trainyard.checkpoint.foreign.hf_folder import write_hf_folder
from trainyard.checkpoint.gpt import gpt_config
from trainyard.checkpoint.load import Checkpoint, open_checkpoint
from trainyard.checkpoint.rewrite import rewrite_step
from trainyard.checkpoint.save import clear_step, publish_step
from trainyard.checkpoint.steps import step_folder
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)


def run(config: ReshardConfig, stage: StageRun) -> dict[str, Any]:
    """Write the step in the format of `--saver`."""
    with open_checkpoint(config.load_dir, "--load-dir") as checkpoint:
        if config.saver == "hf":
            architecture(gpt_config(checkpoint)[0])  # refuse before anything is touched
            _refuse_strange_weights(config, stage)
            _save_hf(config, stage, checkpoint)
        else:
            _save_trainyard(config, stage, checkpoint)
        written = [record for record in stage.records.values() if not record.volatile]
        metrics = {
            "step": checkpoint.step,
            "tensors": len(checkpoint.index),
            "files": len(written),
            "bytes": sum(record.size_bytes for record in written),
        }
    log.info("resharded %s", " ".join(f"{key}={value}" for key, value in metrics.items()))
    return metrics


def _refuse_strange_weights(config: ReshardConfig, stage: StageRun) -> None:
    """A model file that is not ours would be loaded in the place of what is written."""
    ours = set(stage.slot.files if stage.slot else ()) | stage.work.final_names()
    weights = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
    found = store.list_folder(config.save_dir)
    seen = (name for name in found if not name.startswith("."))  # not what a kill left torn
    strange = [name for name in seen if name.endswith(weights) and name not in ours]
    if strange:
        raise ConfigError(
            f"--save-dir {config.save_dir} holds {', '.join(strange[:3])}, which this stage did "
            "not write and a loader might take for the model; choose an empty folder"
        )


def _save_hf(config: ReshardConfig, stage: StageRun, checkpoint: Checkpoint) -> None:
    total = _size(checkpoint, "model.")
    with stage.progress(total, "bytes", "reshard") as progress:
        write_hf_folder(checkpoint, config.num_shards, stage.open, progress.update)


def _save_trainyard(config: ReshardConfig, stage: StageRun, checkpoint: Checkpoint) -> None:
    folder = step_folder(checkpoint.step)
    step_url = join(config.save_dir, folder)
    stage.begin_replacing()
    slot = clear_step(step_url, stage.lineage)
    total = _size(checkpoint, "model.") + _size(checkpoint, "optimizer.")
    with stage.progress(total, "bytes", "reshard") as progress:
        rewrite_step(
            checkpoint,
            config.num_shards,
            lambda name: stage.open(f"{folder}/{name}"),
            progress.update,
        )
    files = tuple(
        replace(record, path=path.removeprefix(f"{folder}/"))
        for path, record in sorted(stage.records.items())
    )
    stage.work.note_final([*stage.records, f"{folder}/{MANIFEST}"])
    manifest = Manifest(stage=stage.name, lineage=stage.lineage, files=files)
    for record in publish_step(step_url, manifest, slot):
        stage.record(record)


def _size(checkpoint: Checkpoint, prefix: str) -> int:
    return sum(checkpoint.spec(name).size_bytes for name in checkpoint.names(prefix))
