"""Where a run begins: at the highest step of its own that is published, at another run's, or at
step 0.

A step belongs to a run when its lineage (configuration and inputs) is the run's."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.checkpoint.load import Checkpoint, Verify, find_steps, open_checkpoint
from trainyard.checkpoint.steps import STATE, step_folder, step_of
from trainyard.errors import ArtifactError, ConfigError
from trainyard.training.callbacks.checkpointing import (
    STAYS,
    remove_step,
)
from trainyard.training.ledger import FILE as LEDGER
from trainyard.training.ledger import Ledger
from trainyard.training.repadding import Repadding
from trainyard.training.state import TrainState
from trainyard.training.step import Trainee
from trainyard.training.tensors import (
    Restoring,
    model_tensors,
    names_over,
    optimizer_tensors,
    renamed,
)

log = logging.getLogger(__name__)

MAIN = "optimizer.param."
"""Begins the names of fp32 main parameters."""

ASIDE = "superseded"
"""Folder in a run folder for the steps of runs that were made anew."""

OURS = re.compile(
    r"(manifest|index|state|config)\.json|ledger\.jsonl|[a-z]+-\d+-of-\d+\.safetensors"
    r"|tokenizer/.+|(.*/)?\..+"  # the last: torn files of killed runs
)
"""Names of the files of a step."""


@dataclass(frozen=True, slots=True)
class FoundSteps:
    """The published steps of a run folder."""

    staying: tuple[int, ...] = ()
    """Steps of this run that stay."""
    passing: tuple[int, ...] = ()
    """Steps of this run that only serve to continue from."""
    foreign: tuple[int, ...] = ()
    """Steps of other configurations or inputs."""
    damaged: tuple[int, ...] = ()
    """Steps of this run, above the one to continue from, that are not as they were published."""

    @property
    def latest(self) -> int | None:
        """The step to continue from."""
        return max(self.staying + self.passing, default=None)


def refuse_strangers(root_url: str) -> None:
    """Refuse a folder with step folders of another program: ours would be written over them."""
    for name in store.list_files(root_url):
        folder, _, file = name.partition("/")
        if file and step_of(folder) is not None and not OURS.fullmatch(file):
            raise ConfigError(
                f"--save {root_url}: {name} was not written by trainyard, and the steps of this "
                "run would replace what is there; choose another folder"
            )


def find_own_steps(root_url: str, lineage: str) -> FoundSteps:
    """What a run folder holds, seen from the run of this lineage."""
    own = find_steps(root_url, lineage)
    states = {step: store.read_json(join(root_url, step_folder(step), STATE)) for step in own}
    staying = tuple(step for step in own if states[step][STAYS])
    passing = tuple(step for step in own if not states[step][STAYS])
    return FoundSteps(staying, passing, tuple(sorted(set(find_steps(root_url)) - set(own))))


def pass_over_damaged(found: FoundSteps, root_url: str, verify: Verify) -> FoundSteps:
    """The steps without the highest ones that are not as they were published, each with a word why;
    the one to continue from is whole, as far as `verify` looks."""
    while (step := found.latest) is not None:
        try:
            with open_checkpoint(join(root_url, step_folder(step)), verify=verify) as checkpoint:
                checkpoint.check()
            return found
        except ArtifactError as error:
            log.warning("passing over step %d, which is damaged: %s", step, error)
        found = replace(
            found,
            staying=tuple(s for s in found.staying if s != step),
            passing=tuple(s for s in found.passing if s != step),
            damaged=(step, *found.damaged),
        )
    return found


def announce(found: FoundSteps, root_url: str) -> None:
    """Say what is continued, and what is passed over and why."""
    if found.foreign:
        log.info(
            "passing over step %s in %s: of other options or inputs; they go to %s/ at the first "
            "checkpoint",
            *(_listed(found.foreign), root_url, ASIDE),
        )
    if found.latest is not None:
        log.info("continuing from step %d in %s", found.latest, root_url)


def _listed(steps: Sequence[int]) -> str:
    first = ", ".join(str(step) for step in steps[:5])
    return first + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def restore_weights(
    checkpoint: Checkpoint, trainee: Trainee, repadding: Repadding | None = None
) -> None:
    """The weights of a checkpoint, and nothing else of it. repadding: where its vocabulary is
    padded otherwise."""
    restoring = Restoring(checkpoint, trainee.groups.world, repadding)
    restoring.fill(model_tensors(trainee.chunks), "model.")


def restore_training(
    checkpoint: Checkpoint, trainee: Trainee, repadding: Repadding | None = None
) -> TrainState:
    """Weights, optimizer and position of a checkpoint."""
    if not checkpoint.names("optimizer."):
        raise ConfigError(
            f"{checkpoint.url} holds weights alone (--no-save-optim, or converted so), and no run "
            "can go on from it; take its weights with --load and --finetune into another --save"
        )
    restore_weights(checkpoint, trainee, repadding)
    _restore_optimizer(Restoring(checkpoint, trainee.groups.world, repadding), trainee)
    state = TrainState()
    state.load_state_dict(checkpoint.state)
    trainee.optimizer.load_state_dict(
        {"num_updates": state.num_updates, "loss_scaler": state.loss_scaler}
    )
    return state


def _restore_optimizer(restoring: Restoring, trainee: Trainee) -> None:
    """Between runs in fp32 and in 16 bits, the weights of the one are the main parameters of the
    other: nothing is rounded."""
    checkpoint, tensors = restoring.checkpoint, optimizer_tensors(trainee)
    names = names_over(restoring.group, tensors)
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
    for name, held in model_tensors(trainee.chunks).items():
        source = f"{MAIN}{name.removeprefix('model.')}"
        if source in stored:
            weights[source] = renamed(held, source)
    restoring.fill(weights, MAIN, stored)


def resume(
    root_url: str,
    step: int,
    trainee: Trainee,
    global_batch_size: int,
    look: Callable[[Checkpoint], Repadding | None] = lambda checkpoint: None,
    verify: Verify = "sizes",
) -> tuple[TrainState, Ledger]:
    """Continue this run at one of its steps; `look` sees the checkpoint before anything is taken
    from it, may refuse it, and says whether its vocabulary is padded otherwise."""
    with open_checkpoint(join(root_url, step_folder(step)), verify=verify) as checkpoint:
        state = restore_training(checkpoint, trainee, look(checkpoint))
        ledger = Ledger(state.ledger_digest)
        if not checkpoint.state[STAYS]:  # its lines are still to be carried by a step that stays
            ledger.lines = store.read_bytes(join(checkpoint.url, LEDGER)).decode().splitlines()
        _check_batch_size(checkpoint, global_batch_size)
    return state, ledger


def _check_batch_size(checkpoint: Checkpoint, global_batch_size: int) -> None:
    before = checkpoint.state["global_batch_size"]
    if before != global_batch_size:
        raise ConfigError(
            f"--global-batch-size was {before} up to step {checkpoint.step} of this run and is "
            f"{global_batch_size} now, as it follows from the number of ranks; give "
            "--global-batch-size"
        )


# --- a finished run ---------------------------------------------------------------------------


def whole_ledger(root_url: str, steps: Sequence[int]) -> bytes:
    """The ledgers of the steps that stay, joined: the whole run."""
    return b"".join(store.read_bytes(join(root_url, step_folder(step), LEDGER)) for step in steps)


def finished_steps(root_url: str, lineage: str) -> tuple[list[FileRecord], bytes]:
    """The files of every step of a run that stays, and the ledger of all; other steps are
    removed."""
    found = find_own_steps(root_url, lineage)
    remove_all_but(root_url, found.staying)
    records = [record for step in found.staying for record in records_of_step(root_url, step)]
    return records, whole_ledger(root_url, found.staying)


def records_of_step(root_url: str, step: int) -> list[FileRecord]:
    """Every file of a published step relative to the run folder, its own manifest (volatile)
    included."""
    folder = step_folder(step)
    url = join(root_url, folder, MANIFEST)
    found = read_manifest(url)
    assert found is not None, url
    data = store.read_bytes(url)
    own = FileRecord(MANIFEST, len(data), digest_bytes(data), volatile=True)
    return [replace(record, path=f"{folder}/{record.path}") for record in (*found[0].files, own)]


def set_aside(root_url: str, steps: Sequence[int]) -> None:
    """Move published steps to `superseded/LINEAGE/`, where `--load` still takes them.

    A run that is made anew, with other options, data or code, must not cost anybody the old one."""
    for step in steps:
        folder = step_folder(step)
        found = read_manifest(join(root_url, folder, MANIFEST))
        if found is None:
            continue
        names = (f"{found[0].lineage[:8]}{ending}" for ending in _endings())
        places = (join(root_url, ASIDE, name, folder) for name in names)
        place = next(url for url in places if not store.list_files(url))
        store.move_tree(join(root_url, folder), place)
        log.info("moved step %d of another run to %s", step, place)


def _endings() -> Iterator[str]:
    yield ""
    yield from (f"-{number}" for number in count(2))


def remove_all_but(root_url: str, steps: Sequence[int]) -> None:
    """Remove every step folder, published or torn, that is not one of these."""
    names = {name.split("/")[0] for name in store.list_files(root_url) if "/" in name}
    found = (step_of(name) for name in sorted(names))
    for step in [step for step in found if step is not None and step not in steps]:
        remove_step(root_url, step)
