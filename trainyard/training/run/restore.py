"""Loads a checkpoint into a model and its optimizer: its whole state, or its weights alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trainyard.checkpoint.layout import listed
from trainyard.checkpoint.load import Restorable
from trainyard.checkpoint.model_tensors import model_tensors, names_over
from trainyard.errors import ArtifactError, ConfigError
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.step import TrainModule
from trainyard.training.run.repadding import Repadding
from trainyard.training.run.tensors import (
    SCALINGS,
    Restoring,
    optimizer_tensors,
    renamed,
    scaling_tensors,
)

log = logging.getLogger(__name__)

MODEL = "model."
"""Prefix of the names of weights."""

MAIN = "optimizer.param."
"""Prefix of the names of fp32 main parameters."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Weights that may be missing from a checkpoint or unused: patterns of their names, with or
    without the prefix `model.`."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @staticmethod
    def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
        """The names that match a pattern, sorted."""
        return sorted(
            name
            for name in names
            if any(
                fnmatchcase(name, p) or fnmatchcase(name.removeprefix(MODEL), p) for p in patterns
            )
        )


def restore_weights(
    checkpoint: Restorable,
    train_module: TrainModule,
    repadding: Repadding | None = None,
    allowed: Allowed | None = None,
) -> None:
    """Load only the weights of a checkpoint. repadding: if its vocabulary is padded otherwise.
    allowed: weights that may be missing, which keep their values, or unused."""
    restoring = Restoring(checkpoint, train_module.groups, repadding)
    tensors = model_tensors(train_module.chunks, to_fill=True)
    if allowed is None:
        restoring.fill(tensors, MODEL)
        return
    wanted = names_over(train_module.groups, tensors)
    stored_names = set(checkpoint.names(MODEL))
    missing = allowed.matching(wanted - stored_names, allowed.missing)
    unexpected = allowed.matching(stored_names - wanted, allowed.unexpected)
    if train_module.groups.rank == 0:
        _log_names("not in the checkpoint: initialised", missing)
        _log_names("--load-allow-unexpected: not loaded", unexpected)
    for name in missing:
        tensors.pop(name, None)
    try:
        restoring.fill(tensors, MODEL, (wanted - set(missing)) | set(unexpected))
    except ArtifactError as error:
        lacking = wanted - stored_names - set(missing)
        surplus = stored_names - wanted - set(unexpected)
        raise ArtifactError(f"{error}{_hint(bool(lacking), bool(surplus))}") from error


def _hint(lacking: bool, surplus: bool) -> str:
    """A hint at the options for a checkpoint that lacks weights on purpose, or has more."""
    ways = []
    if lacking:
        ways.append("--load-allow-missing PATTERN ... to initialise them")
    if surplus:
        ways.append("--load-allow-unexpected PATTERN ... to leave them in the checkpoint")
    return f"\n  if this is intended, give {' and '.join(ways)}" if ways else ""


def _log_names(what: str, names: Sequence[str]) -> None:
    if names:
        log.warning("%s: %d weights%s", what, len(names), listed("these", names))


def restore_training(
    checkpoint: Restorable,
    train_module: TrainModule,
    repadding: Repadding | None = None,
    *,
    with_optimizer: bool = True,
) -> TrainState:
    """Load weights, optimizer and position of a checkpoint. Without the optimizer, its moments and
    schedules start over, as in Megatron-LM."""
    if not with_optimizer:
        restore_weights(checkpoint, train_module, repadding)
        train_module.optimizer.adopt_model_parameters()
        state = TrainState()
        state.load_state_dict(checkpoint.state)
        state.scheduled_samples = state.num_updates = 0
        state.loss_scaler = {}
        return state
    if not checkpoint.names("optimizer."):
        raise ConfigError(
            f"{checkpoint.url} has weights only (--no-save-optim, or converted so), and no run can "
            "resume from it; take its weights with --load and --finetune into another --save"
        )
    restore_weights(checkpoint, train_module, repadding)
    restoring = Restoring(checkpoint, train_module.groups, repadding)
    _restore_optimizer(restoring, train_module)
    _restore_scalings(restoring, train_module)
    state = TrainState()
    state.load_state_dict(checkpoint.state)
    train_module.optimizer.load_state_dict(
        {"num_updates": state.num_updates, "loss_scaler": state.loss_scaler}
    )
    return state


def _restore_scalings(restoring: Restoring, train_module: TrainModule) -> None:
    """The maxima of past steps, unless the run or the checkpoint has no delayed scaling."""
    tensors = scaling_tensors(train_module)
    names = names_over(restoring.groups, tensors)
    stored = restoring.checkpoint.names(SCALINGS)
    if names and stored:
        restoring.fill(tensors, SCALINGS, names)
    elif names and train_module.groups.rank == 0:
        log.warning("the checkpoint has no maxima of --fp8-recipe delayed: they start over")


def _restore_optimizer(restoring: Restoring, train_module: TrainModule) -> None:
    """Between fp32 and 16-bit runs, the weights of the one are the main parameters of the other:
    nothing is rounded."""
    checkpoint, tensors = restoring.checkpoint, optimizer_tensors(train_module)
    names = names_over(restoring.groups, tensors)
    stored = set(checkpoint.names(MAIN))
    keeps_main = any(name.startswith(MAIN) for name in names)
    if keeps_main == bool(stored):
        restoring.fill(tensors, "optimizer.", names)
        return
    moments = {name: held for name, held in tensors.items() if not name.startswith(MAIN)}
    restoring.fill(moments, "optimizer.", names | stored)
    weights = {}
    if keeps_main:
        for name in tensors.keys() - moments.keys():
            source = f"model.{name.removeprefix(MAIN)}"
            weights[source] = renamed(tensors[name], source)
        restoring.fill(weights, "model.", checkpoint.names("model."))
        return
    for name, held in model_tensors(train_module.chunks, to_fill=True).items():
        source = f"{MAIN}{name.removeprefix('model.')}"
        if source in stored:
            weights[source] = renamed(held, source)
    restoring.fill(weights, MAIN, stored)
