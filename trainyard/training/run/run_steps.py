"""The published steps of a run folder: which are this run's, which one to resume from, and what is
left at the end.

A step belongs to a run if it has the run's lineage: the digest of its inputs and of the options
that identify it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from trainyard.artifacts import store
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import Manifest, PartRecord, read_listed_json, read_manifest
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
from trainyard.training.run.other_runs import ASIDE
from trainyard.training.run.repadding import Repadding
from trainyard.training.run.restore import restore_training
from trainyard.training.run.step_ledgers import (
    StepLedger,
    carried_lines,
    join_ledgers,
    ledger_fault,
    read_ledgers,
    warn_about_gaps,
)

log = logging.getLogger(__name__)

STAYS = "stays"
"""Key of state.json: false for a step that only serves to continue from."""

OURS = re.compile(
    r"(manifest|index|state|config)\.json|ledger\.jsonl|[a-z0-9]+-\d+-of-\d+\.safetensors"
    r"|tokenizer/.+|(.*/)?\..+"  # the last: torn files of killed runs
)
"""Names of the files of a step."""


@dataclass(frozen=True, slots=True)
class FoundSteps:
    """The published steps of a run folder."""

    staying: tuple[int, ...] = ()
    """Steps of this run that stay."""
    passing: tuple[int, ...] = ()
    """Temporary steps of this run, to resume from."""
    foreign: tuple[int, ...] = ()
    """Steps of other configurations or inputs."""
    damaged: tuple[int, ...] = ()
    """Steps that differ from their manifest, of this run or an unknown one."""

    @property
    def latest(self) -> int | None:
        """The step to resume from."""
        return max(self.staying + self.passing, default=None)


def refuse_strangers(root_url: str) -> None:
    """Refuse a folder with step folders of another program: steps of this run would replace
    them."""
    for name in store.list_files(root_url):
        folder, _, file = name.partition("/")
        if file and step_of(folder) is not None and not OURS.fullmatch(file):
            raise ConfigError(
                f"--save {root_url}: {name} was not written by trainyard, and the steps of this "
                "run would replace it; choose another folder"
            )


def find_own_steps(root_url: str, lineage: str) -> FoundSteps:
    """The steps of a run folder, for the run of this lineage. A step with an unreadable manifest or
    state is damaged; the other steps are found all the same."""
    stays: dict[int, bool] = {}
    foreign, damaged = [], []
    for step in published_steps(root_url):
        url = join(root_url, step_folder(step))
        try:
            manifest = manifest_of(url)
            if manifest is None:
                continue
            if manifest.lineage == lineage:
                stays[step] = _stays(url, manifest)
            else:
                foreign.append(step)
        except ArtifactError as error:
            _log_skipped(step, error)
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


def _log_skipped(step: int, error: ArtifactError) -> None:
    log.warning("skipping step %d, which is damaged: %s", step, error)


def skip_damaged(found: FoundSteps, root_url: str, verify: Verify) -> FoundSteps:
    """The steps without the newest damaged ones, each logged with its fault. The step to resume
    from passes the check of `verify`, and its ledger is always checked.

    If no whole step is left, the newest one with only a damaged ledger: training can resume without
    the proof of its samples."""
    rest, damaged = found, set(found.damaged)
    while (step := rest.latest) is not None:
        url = join(root_url, step_folder(step))
        try:
            with open_checkpoint(url, verify=verify) as checkpoint:
                checkpoint.check(apart_from=(LEDGER,))
        except ArtifactError as error:
            _log_skipped(step, error)
            damaged.add(step)
        else:
            fault = ledger_fault(url)
            if not fault:
                return rest
            _log_skipped(step, ArtifactError(fault))
        rest = _without(rest, {step})
    left = _without(found, damaged)
    if left.latest is not None:
        log.warning(
            "no whole step is left: resuming from step %d, of which only the ledger is damaged",
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


def log_found_steps(found: FoundSteps, root_url: str) -> None:
    """Log the steps that are skipped and why, and damaged ledgers before the step to resume
    from."""
    if found.foreign:
        log.warning(
            "skipping step %s in %s, which this run replaces: its first checkpoint moves them to "
            "%s/",
            *(_listed(found.foreign), root_url, ASIDE),
        )
    if found.latest is not None:
        warn_about_gaps(root_url, sorted({*found.staying, found.latest}))


def _listed(steps: Sequence[int]) -> str:
    first = ", ".join(str(step) for step in steps[:5])
    return first + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def resume(
    checkpoint: Checkpoint,
    train_module: TrainModule,
    global_batch_size: int | None,
    repadding: Repadding | None = None,
    last_staying: int = 0,
) -> tuple[TrainState, Ledger]:
    """Load one of this run's steps. global_batch_size: must be that of the step; None: another one
    was given. repadding: if its vocabulary is padded otherwise.
    last_staying: the newest permanent step of the run folder, which has the ledger up to itself."""
    state = restore_training(checkpoint, train_module, repadding)
    ledger = Ledger(state.ledger_digest)
    if not checkpoint.state[STAYS]:  # the next permanent step repeats its lines
        ledger.lines = carried_lines(checkpoint.url, state.step, last_staying)
    if global_batch_size is not None:
        _check_batch_size(checkpoint, global_batch_size)
    return state, ledger


def _check_batch_size(checkpoint: Checkpoint, global_batch_size: int) -> None:
    before = checkpoint.state["global_batch_size"]
    if before != global_batch_size:
        raise ConfigError(
            f"--global-batch-size was {before} up to step {checkpoint.step} of this run and is "
            f"{global_batch_size} now, because it depends on the number of ranks; give "
            "--global-batch-size"
        )


# --- a finished run ---------------------------------------------------------------------------


def whole_ledger(root_url: str, steps: Sequence[int]) -> bytes:
    """The joined ledgers of the permanent steps: the whole run."""
    return b"".join(join_ledgers(read_ledgers(root_url, steps)))


@dataclass(frozen=True, slots=True)
class FinishedSteps:
    """The permanent steps of a finished run, as its manifest has them."""

    parts: list[PartRecord]
    """The steps, each with a manifest of its own."""
    files: list[FileRecord]
    """The files of steps with a damaged ledger, which differ from their manifests."""


def finished_steps(
    root_url: str, lineage: str, write: Callable[[bytes], object], skipped: Sequence[int] = ()
) -> FinishedSteps:
    """The permanent steps of a run; removes other steps. write: gets the lines of the whole ledger.

    skipped: damaged steps that the run has logged at its start; they are moved aside."""
    found = find_own_steps(root_url, lineage)
    known = [step for step in found.damaged if step in skipped]
    if len(known) < len(found.damaged):  # damaged while this run trained
        raise ArtifactError(
            f"{root_url}: step {_listed(found.damaged)} became unreadable during this run "
            "(see above); nothing was removed. Restore it, or give the same command again: that "
            "moves the step aside and finishes the run without it"
        )
    set_aside(root_url, known)
    remove_all_but(root_url, found.staying)
    finished = FinishedSteps([], [])

    def listed() -> Iterator[StepLedger]:
        for ledger in read_ledgers(root_url, found.staying):
            manifest = manifest_of(join(root_url, step_folder(ledger.step)))
            assert manifest is not None, ledger.url
            if manifest.record(LEDGER) == ledger.record:
                finished.parts.append(PartRecord.of(step_folder(ledger.step), manifest))
            else:
                finished.files.extend(_files_as_they_are(root_url, manifest, ledger))
            yield ledger

    for line in join_ledgers(listed()):
        write(line)
    return finished


def _files_as_they_are(
    root_url: str, manifest: Manifest, ledger: StepLedger
) -> Iterator[FileRecord]:
    """Every file of a step with a damaged ledger relative to the run folder, the ledger as it is,
    and the step's manifest (volatile)."""
    folder = step_folder(ledger.step)
    data = store.read_bytes(join(root_url, folder, MANIFEST))
    own = FileRecord(MANIFEST, len(data), digest_bytes(data), volatile=True)
    listed = [record for record in manifest.files if record.path != LEDGER]
    for record in (*listed, *([ledger.record] if ledger.record else []), own):
        yield replace(record, path=f"{folder}/{record.path}")


def set_aside(root_url: str, steps: Sequence[int]) -> None:
    """Move published steps to `superseded/LINEAGE/`, where `--load` still finds them.

    A run with other options, data or code must not delete the steps of the old one."""
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
        log.info("moved step aside step=%d url=%s", step, place)


def _endings() -> Iterator[str]:
    yield ""
    yield from (f"-{number}" for number in count(2))


def remove_all_but(root_url: str, steps: Sequence[int]) -> None:
    """Remove every step folder, published or torn, that is not one of these."""
    names = {name.split("/")[0] for name in store.list_files(root_url) if "/" in name}
    found = (step_of(name) for name in sorted(names))
    for step in [step for step in found if step is not None and step not in steps]:
        remove_step(root_url, step)
