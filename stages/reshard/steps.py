"""Writes a trainyard step folder through the stage's files, and copies a step into other files.

Needs no torch, whose import takes longer than to copy a gigabyte."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from stages.reshard.config import ReshardConfig
from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest, PartRecord
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import OutputFile
from trainyard.artifacts.urls import is_hidden, join
from trainyard.checkpoint.model_config import check_model_config
from trainyard.checkpoint.plan import kind_of
from trainyard.checkpoint.reshard import (
    RESHARDED,
    OpenFile,
    files_written,
    read_copied,
    rewrite_step,
)
from trainyard.checkpoint.steps import clear_step, publish_step, step_folder
from trainyard.checkpoint.stored_step import open_step
from trainyard.errors import ConfigError

Write = Callable[[OpenFile, Callable[[int], object]], None]
"""Writes the files of a step, by their names in it, and reports the bytes written."""

OF_MEGATRON = re.compile(r"latest_checkpointed_iteration\.txt|.+\.pt|.+\.distcp")


def copy_step(config: ReshardConfig, stage: StageRun) -> dict[str, Any]:
    """Copy a trainyard step into another number of files."""
    with open_step(config.load_dir, "--load-dir") as step:
        step.check()  # never copy a damaged step
        check_model_config(step)
        copied = read_copied(step)
        total = sum(
            step.spec(name).size_bytes for name in step.names() if kind_of(name) in RESHARDED
        )

        def write(open_file: OpenFile, advance: Callable[[int], object]) -> None:
            rewrite_step(step, config.shards, copied, open_file, advance)

        names = files_written(step, config.shards)
        save_files(config, stage, step.step, total, write, names)
        return {"step": step.step, "tensors": len(step.index)}


def save_files(
    config: ReshardConfig,
    stage: StageRun,
    step: int,
    total: int,
    write: Write,
    names: Sequence[str] = (),
) -> None:
    """Write a step folder with its own manifest.

    names: all files that `write` writes, if known; required if threads open several at once."""
    folder = step_folder(step)
    step_url = join(config.save_dir, folder)
    refuse_strangers(config, stage, OF_MEGATRON.fullmatch)
    stage.begin_replacing()
    slot = clear_step(step_url, stage.lineage)
    open_one = partial(_open_recorded, stage) if names else stage.open
    if names:
        stage.work.record_final(f"{folder}/{name}" for name in (*names, MANIFEST))
    with stage.progress(total, "bytes", "reshard") as progress:
        write(lambda name: open_one(f"{folder}/{name}"), progress.update)
    files = tuple(
        replace(record, path=path.removeprefix(f"{folder}/"))
        for path, record in sorted(stage.records.items())
    )
    stage.work.record_final([*stage.records, f"{folder}/{MANIFEST}"])
    manifest = Manifest(stage=stage.name, lineage=stage.lineage, files=files)
    publish_step(step_url, manifest, slot)
    stage.records = {}
    stage.record_part(PartRecord.of(folder, manifest))


@contextmanager
def _open_recorded(stage: StageRun, path: str) -> Iterator[OutputFile]:
    """Start a final file whose name is already recorded, in any thread."""
    assert stage.output is not None
    with store.open_output(stage.output.file_url(path), path) as out:
        yield out
        stage.check_claim()
    stage.record(out.record)


def refuse_strangers(
    config: ReshardConfig, stage: StageRun, is_weights: Callable[[str], object]
) -> None:
    """Refuse a folder with another program's model files: a loader could take them for the
    output."""
    ours = set(stage.slot.files if stage.slot else ()) | stage.work.final_names()
    found = store.list_files(config.save_dir)
    # Hidden names are temporary files of killed runs, or work for the next run.
    seen = (name for name in found if not is_hidden(name))
    strange = [name for name in seen if is_weights(name) and name not in ours]
    if strange:
        raise ConfigError(
            f"--save-dir {config.save_dir} has {', '.join(strange[:3])}, which this stage did not "
            "write and a loader might take for the model; choose an empty folder"
        )
