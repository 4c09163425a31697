"""Where a run begins: at the highest step of its own that is published, at another run's, or at
step 0.

A step belongs to a run when its lineage (configuration and inputs) is the run's."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import Manifest, read_listed_json, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import join
from trainyard.checkpoint.load import Checkpoint, open_checkpoint
from trainyard.checkpoint.steps import (
    STATE,
    manifest_of,
    published_steps,
    remove_step,
    step_folder,
    step_of,
)
from trainyard.checkpoint.stored_step import Verify
from trainyard.errors import ArtifactError, ConfigError
from trainyard.training.loop.ledger import FILE as LEDGER
from trainyard.training.loop.ledger import Ledger
from trainyard.training.loop.state import TrainState
from trainyard.training.loop.step import TrainModule
from trainyard.training.run.repadding import Repadding
from trainyard.training.run.restore import restore_training
from trainyard.training.run.step_ledgers import (
    StepLedger,
    carried_lines,
    join_ledgers,
    ledger_fault,
    read_ledgers,
    tell_lost_proof,
)

log = logging.getLogger(__name__)

STAYS = "stays"
"""Key of state.json: false for a step that only serves to continue from."""

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
    """Steps of this run, or of nobody can say which, that are not as they were published."""

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
    """What a run folder holds, seen from the run of this lineage. A step whose manifest or state
    cannot be read is damaged; the others are there all the same."""
    stays: dict[int, bool] = {}
    foreign, damaged = [], []
    for step in published_steps(root_url):
        url = join(root_url, step_folder(step))
        try:
            manifest = manifest_of(url)
            if manifest is not None and manifest.lineage == lineage:
                stays[step] = _stays(url, manifest)
            elif manifest is not None:
                foreign.append(step)
        except ArtifactError as error:
            _pass_over(step, error)
            damaged.append(step)
    staying = tuple(step for step, stay in stays.items() if stay)
    passing = tuple(step for step, stay in stays.items() if not stay)
    return FoundSteps(staying, passing, tuple(foreign), tuple(damaged))


def _stays(step_url: str, manifest: Manifest) -> bool:
    url = join(step_url, STATE)
    state = read_listed_json(url, manifest.record(STATE))
    if not isinstance(state, dict) or not isinstance(state.get(STAYS), bool):
        raise ArtifactError(f"{url}: not the state of a step")
    return bool(state[STAYS])


def _pass_over(step: int, error: ArtifactError) -> None:
    log.warning("passing over step %d, which is damaged: %s", step, error)


def pass_over_damaged(found: FoundSteps, root_url: str, verify: Verify) -> FoundSteps:
    """The steps without the highest ones that are not as they were published, each with a word why;
    the one to continue from is whole, as far as `verify` looks, and its ledger is in any case.

    Where none is left, the highest whose ledger alone is damaged: a run can be trained on without
    the proof of what it was made of."""
    rest, damaged = found, set(found.damaged)
    while (step := rest.latest) is not None:
        url = join(root_url, step_folder(step))
        try:
            with open_checkpoint(url, verify=verify) as checkpoint:
                checkpoint.check(apart_from=(LEDGER,))
        except ArtifactError as error:
            _pass_over(step, error)
            damaged.add(step)
        else:
            fault = ledger_fault(url)
            if not fault:
                return rest
            _pass_over(step, ArtifactError(fault))
        rest = _without(rest, {step})
    left = _without(found, damaged)
    if left.latest is not None:
        log.warning(
            "no step is left that is whole: going on from step %d all the same, of which nothing "
            "but the ledger is damaged",
            left.latest,
        )
        return left
    return rest


def _without(found: FoundSteps, steps: set[int]) -> FoundSteps:
    return replace(
        found,
        staying=tuple(step for step in found.staying if step not in steps),
        passing=tuple(step for step in found.passing if step not in steps),
        damaged=tuple(sorted(steps.union(found.damaged))),
    )


def announce(found: FoundSteps, root_url: str) -> None:
    """Say what is passed over and why, and which ledgers of the steps before the one to continue
    from are damaged."""
    if found.foreign:
        log.warning(
            "passing over step %s in %s: of other options or inputs, so this is another run; they "
            "go to %s/ at its first checkpoint. To go on from them, stop and give --load %s and "
            "another --save",
            *(_listed(found.foreign), root_url, ASIDE, root_url),
        )
    if found.latest is not None:
        tell_lost_proof(root_url, sorted({*found.staying, found.latest}))


def _listed(steps: Sequence[int]) -> str:
    first = ", ".join(str(step) for step in steps[:5])
    return first + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def resume(
    checkpoint: Checkpoint,
    train_module: TrainModule,
    global_batch_size: int,
    repadding: Repadding | None = None,
    last_staying: int = 0,
) -> tuple[TrainState, Ledger]:
    """Continue this run at one of its steps. repadding: where its vocabulary is padded otherwise.
    last_staying: the last step that stays in the run folder, which has the ledger up to it."""
    state = restore_training(checkpoint, train_module, repadding)
    ledger = Ledger(state.ledger_digest)
    if not checkpoint.state[STAYS]:  # its lines are still to be carried by a step that stays
        ledger.lines = carried_lines(checkpoint.url, state.step, last_staying)
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
    return join_ledgers(list(read_ledgers(root_url, steps)))


def finished_steps(
    root_url: str, lineage: str, passed_over: Sequence[int] = ()
) -> tuple[list[FileRecord], bytes]:
    """The files of every step of a run that stays, and the ledger of all; other steps are removed.

    passed_over: damaged steps that the run has told of when it began; they are set aside."""
    found = find_own_steps(root_url, lineage)
    known = [step for step in found.damaged if step in passed_over]
    if len(known) < len(found.damaged):  # by whom, and since this run has begun
        raise ArtifactError(
            f"{root_url}: step {_listed(found.damaged)} cannot be read any more, as told above; "
            "when this run began it could be, and nothing was removed. Put it right, or give the "
            "same command again: it sets that step aside and ends the run without it"
        )
    set_aside(root_url, known)
    remove_all_but(root_url, found.staying)
    ledgers = list(read_ledgers(root_url, found.staying))
    records = [record for ledger in ledgers for record in records_of_step(root_url, ledger)]
    return records, join_ledgers(ledgers)


def records_of_step(root_url: str, ledger: StepLedger) -> Iterator[FileRecord]:
    """Every file of a published step relative to the run folder, its own manifest (volatile)
    included; of a damaged ledger what is there, as the run is published with that."""
    folder = step_folder(ledger.step)
    url = join(root_url, folder, MANIFEST)
    found = read_manifest(url)
    assert found is not None, url
    data = store.read_bytes(url)
    own = FileRecord(MANIFEST, len(data), digest_bytes(data), volatile=True)
    listed = [record for record in found[0].files if record.path != LEDGER]
    for record in (*listed, *([ledger.record] if ledger.record else []), own):
        yield replace(record, path=f"{folder}/{record.path}")


def set_aside(root_url: str, steps: Sequence[int]) -> None:
    """Move published steps to `superseded/LINEAGE/`, where `--load` still takes them.

    A run that is made anew, with other options, data or code, must not cost anybody the old one."""
    for step in steps:
        folder = step_folder(step)
        try:
            found = read_manifest(join(root_url, folder, MANIFEST))
        except ArtifactError:
            whose = "damaged"
        else:
            if found is None:
                continue
            whose = found[0].lineage[:8]
        names = (f"{whose}{ending}" for ending in _endings())
        places = (join(root_url, ASIDE, name, folder) for name in names)
        place = next(url for url in places if not store.list_files(url))
        store.move_tree(join(root_url, folder), place)
        log.info("moved step %d, which is not gone on from, to %s", step, place)


def _endings() -> Iterator[str]:
    yield ""
    yield from (f"-{number}" for number in count(2))


def remove_all_but(root_url: str, steps: Sequence[int]) -> None:
    """Remove every step folder, published or torn, that is not one of these."""
    names = {name.split("/")[0] for name in store.list_files(root_url) if "/" in name}
    found = (step_of(name) for name in sorted(names))
    for step in [step for step in found if step is not None and step not in steps]:
        remove_step(root_url, step)
