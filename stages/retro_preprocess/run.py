"""Reads the project's options, writes them, and runs the stages one after another."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from dataclasses import fields
from typing import Any

from stages.retro_preprocess.commands import Command, Commands
from stages.retro_preprocess.config import RetroPreprocessConfig
from stages.runtime.context import StageRun
from stages.runtime.parent_watch import LIFELINE
from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.config import flag, from_table
from trainyard.errors import ConfigError
from trainyard.retrieval.project import (
    CONFIG,
    Project,
    ProjectConfig,
    options_of,
    read_project,
    with_neighbors,
    write_project,
)
from trainyard.training.run_samples import open_chunks

log = logging.getLogger(__name__)


def run(config: RetroPreprocessConfig, stage: StageRun) -> dict[str, Any]:
    """Run every step. Ends with the exit status of the first stage that fails."""
    project = merged_project(config)
    commands = Commands(config, project)
    planned = [command for step in config.steps() for command in commands.of_step(step)]
    if "query-neighbors" in config.steps():
        check_samples(commands, project)
    for number, command in enumerate(planned, 1):
        log.info("%d of %d: %s", number, len(planned), shlex.join(["python", *command.argv()]))
        project = _run(command, project)
    return {"stages": len(planned)}


def check_samples(commands: Commands, project: Project) -> None:
    """Refuse data without a sample in a split, before all chunks are cut and embedded for it."""
    for split in commands.splits():
        open_chunks(commands.samples(), split, project.config.retro_gpt_chunk_length)


def _run(command: Command, project: Project) -> Project:
    status = _status([sys.executable, *command.argv()])
    if status:
        raise SystemExit(status if status > 0 else 128 - status)
    if command.split is not None:
        project = with_neighbors(project, command.split, command.split)
    write_project(project)  # now a part of it is there
    return project


def _status(command: list[str]) -> int:
    """Exit status of a stage, which stops when this program does, even by SIGKILL."""
    read, write = os.pipe()
    os.set_inheritable(read, True)
    environment = os.environ | {LIFELINE: str(read)}
    try:
        with subprocess.Popen(command, env=environment, pass_fds=(read,)) as process:
            os.close(read)
            try:
                return process.wait()
            except BaseException:
                process.terminate()  # it saves, and ends
                raise
    finally:
        os.close(write)


def merged_project(config: RetroPreprocessConfig) -> Project:
    """The project with the given options over those in its config.json.

    Raises ConfigError for a missing option, and for one that differs from the one with which parts
    of the project were made."""
    url = config.retro_project_dir
    names = {one.name for one in fields(ProjectConfig)} & {one.name for one in fields(config)}
    given = {name: getattr(config, name) for name in sorted(names)}
    given = {name: value for name, value in given.items() if value not in (None, ())}
    where = join(url, CONFIG)
    written: dict[str, Any] = {}
    if store.exists(where):
        written = read_project(url).config.to_document()
        _refuse_changes(given, written, where)
    table = options_of({**written, **given}, where)
    missing = [name for name in REQUIRED if name not in table]
    if missing:
        raise ConfigError(f"{flag(missing[0])} is needed, as {where} does not have it")
    return Project(url, from_table(ProjectConfig, table, where))


REQUIRED = (
    *("retro_gpt_data_path", "retro_gpt_train_samples", "retro_gpt_eval_interval"),
    *("retro_gpt_eval_iters", "retro_gpt_tokenizer_type", "retro_gpt_seq_length"),
    *("retro_gpt_global_batch_size", "retro_bert_tokenizer_type", "retro_bert_vocab_file"),
)
IDENTITY = (
    *("retro_gpt_seed", "retro_gpt_data_path", "retro_gpt_split", "retro_gpt_train_samples"),
    *("retro_gpt_eval_interval", "retro_gpt_eval_iters", "retro_gpt_tokenizer_type"),
    *("retro_gpt_seq_length", "retro_gpt_global_batch_size", "retro_gpt_chunk_length"),
)
"""Options of which a project has one value, as all its parts were made with it."""


def _refuse_changes(given: dict[str, Any], written: dict[str, Any], where: str) -> None:
    for name in IDENTITY:
        if name not in given or name not in written:
            continue
        now, before = given[name], written[name]
        if (list(now) if isinstance(now, tuple) else now) != before:
            raise ConfigError(
                f"{flag(name)} {now}: {where} has {before}, with which parts of the project were "
                "made. Take another --retro-project-dir, or leave the option out"
            )
