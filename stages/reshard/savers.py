"""What writes each format of `--saver`, through the files of the stage."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
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
from trainyard.checkpoint.foreign.into import check_source, write_step_of
from trainyard.checkpoint.foreign.megatron import write_megatron
from trainyard.checkpoint.foreign.megatron_names import ModelClass
from trainyard.checkpoint.foreign.source import Source
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.rewrite import RESHARDED, OpenFile, rewrite_step
from trainyard.checkpoint.save import clear_step, kind_of, publish_step
from trainyard.checkpoint.steps import step_folder
from trainyard.errors import ConfigError
from trainyard.progress import Progress

Save = Callable[[ReshardConfig, StageRun, Source, str], None]
"""Writes a source; the last is the loader that it was read with."""

Write = Callable[[OpenFile, Callable[[int], object]], None]
"""Writes the files of a step, by their names in it, and tells the bytes that it wrote."""

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")

OF_MEGATRON = re.compile(r"latest_checkpointed_iteration\.txt|.+\.pt|.+\.distcp")


# --- ours -----------------------------------------------------------------------------------------


def copy_step(config: ReshardConfig, stage: StageRun) -> dict[str, Any]:
    """Ours into ours: all of a step, in another number of files."""
    with open_checkpoint(config.load_dir, "--load-dir") as checkpoint:
        total = sum(
            checkpoint.spec(name).size_bytes
            for name in checkpoint.names()
            if kind_of(name) in RESHARDED
        )

        def write(open_file: OpenFile, advance: Callable[[int], object]) -> None:
            rewrite_step(checkpoint, config.shards, open_file, advance)

        _save_step(config, stage, checkpoint.step, total, write)
        return {"step": checkpoint.step, "tensors": len(checkpoint.index)}


def save_trainyard(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Somebody else's as a step of ours."""
    check_source(source)

    def write(open_file: OpenFile, advance: Callable[[int], object]) -> None:
        write_step_of(source, loader, config.shards, open_file, advance)

    _save_step(config, stage, source.step, _size(source), write)


def _save_step(config: ReshardConfig, stage: StageRun, step: int, total: int, write: Write) -> None:
    """A step folder with a manifest of its own."""
    folder = step_folder(step)
    step_url = join(config.save_dir, folder)
    _refuse_strangers(config, stage, OF_MEGATRON.fullmatch)
    stage.begin_replacing()
    slot = clear_step(step_url, stage.lineage)
    with stage.progress(total, "bytes", "reshard") as progress:
        write(lambda name: stage.open(f"{folder}/{name}"), progress.update)
    files = tuple(
        replace(record, path=path.removeprefix(f"{folder}/"))
        for path, record in sorted(stage.records.items())
    )
    stage.work.note_final([*stage.records, f"{folder}/{MANIFEST}"])
    manifest = Manifest(stage=stage.name, lineage=stage.lineage, files=files)
    for record in publish_step(step_url, manifest, slot):
        stage.record(record)


# --- others ---------------------------------------------------------------------------------------


def save_hf(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """A folder that `from_pretrained` loads."""
    architecture(source.config)  # refuse before anything is touched
    check_source(source)
    _refuse_strangers(config, stage, lambda name: "/" not in name and name.endswith(WEIGHTS))
    with stage.progress(_size(source, "model."), "bytes", "reshard") as progress:
        write_hf_folder(source, config.shards, stage.open, progress.update)


def save_core(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Files of Megatron-LM's core models."""
    _save_megatron(config, stage, source, "core")


def save_legacy(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Files of Megatron-LM's old models."""
    _save_megatron(config, stage, source, "legacy")


def _save_megatron(
    config: ReshardConfig, stage: StageRun, source: Source, model_class: ModelClass
) -> None:
    check_source(source)
    _refuse_strangers(config, stage, OF_MEGATRON.fullmatch)
    tokens = config.true_vocab_size
    if tokens is None and config.make_vocab_size_divisible_by is not None:
        tokens = source.vocab_size  # to be padded anew
    with ExitStack() as stack:
        told: list[Progress] = []
        write_megatron(
            source,
            stage.open,
            model_class=model_class,
            tp=config.tensor_parallel_size,
            pp=config.pipeline_parallel_size,
            transformer_impl=None if model_class == "legacy" else config.saver_transformer_impl,
            true_vocab_size=tokens,
            make_vocab_size_divisible_by=config.make_vocab_size_divisible_by,
            expect=lambda total: told.append(
                stack.enter_context(stage.progress(total, "bytes", "reshard"))
            ),
            advance=lambda size: told[0].update(size),
        )


SAVERS: dict[str, Save] = {
    "trainyard": save_trainyard,
    "hf": save_hf,
    "core": save_core,
    "legacy": save_legacy,
}


def _refuse_strangers(
    config: ReshardConfig, stage: StageRun, is_weights: Callable[[str], object]
) -> None:
    """A model file that is not ours would be loaded in the place of what is written, or lost."""
    ours = set(stage.slot.files if stage.slot else ()) | stage.work.final_names()
    found = store.list_files(config.save_dir)
    # Not what a kill left torn, in whatever folder, nor what is kept for the next run.
    seen = (n for n in found if not any(part.startswith(".") for part in n.split("/")))
    strange = [name for name in seen if is_weights(name) and name not in ours]
    if strange:
        raise ConfigError(
            f"--save-dir {config.save_dir} holds {', '.join(strange[:3])}, which this stage did "
            "not write and a loader might take for the model; choose an empty folder"
        )


def _size(source: Source, prefix: str = "") -> int:
    """Bytes of the tensors to be written."""
    return sum(s.size_bytes for name, s in source.specs.items() if name.startswith(prefix))
