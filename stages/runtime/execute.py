"""One run of a stage: decide, claim, work, publish, clean up.

This order makes a kill at any point harmless: a run writes final files only under the claim,
retires the old manifest before the first final file changes, and writes the new one last."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.runtime import ranks
from stages.runtime.context import STOPPING, StageRun
from stages.runtime.failure import RunOutcome, clear_reports, report_outcome
from stages.runtime.share_digests import AS_SHARES, SHARES_LINEAGE
from stages.runtime.up_to_date import (
    CODE_FILES,
    Decision,
    MadeInShares,
    decide,
    is_forced,
    missing_file,
)
from trainyard.artifacts import retry, store
from trainyard.artifacts.abandoned import Abandoned
from trainyard.artifacts.claim import acquire
from trainyard.artifacts.conditional import require_conditions
from trainyard.artifacts.manifest import FORCE, Manifest, publish, read_manifest, read_slot
from trainyard.artifacts.output import Output
from trainyard.artifacts.parts import remove_others
from trainyard.artifacts.urls import local_path
from trainyard.errors import ClaimHeldError, ConfigError


@dataclass(frozen=True, slots=True)
class StageInvocation:
    """A stage with its options from the command line."""

    name: str
    config: Any
    run_module: str
    check_module: str
    """Module with `check_inputs(config)`, and `check_output(config, lineage, input_digests)` for a
    stage that does not replace every output; empty for a stage without them."""
    arguments: list[str]
    """The command line, for the ranks that the job starts."""
    force: bool
    claim_wait_seconds: float
    outcomes: list[RunOutcome] | None = None
    """Gets how the run ended, if it is one of several in this process; None: it is reported."""
    abandoned: Abandoned = field(default_factory=Abandoned)
    """Temporary files of killed runs."""

    @property
    def log(self) -> logging.Logger:
        """The logger of this stage."""
        return logging.getLogger(f"stages.{self.name}")

    @property
    def spent(self) -> tuple[str, ...]:
        """Folders that the configuration removes once the output is published."""
        return self.config.spent() if isinstance(self.config, MadeInShares) else ()

    @property
    def forced_by(self) -> str:
        """The id of the flow run that forces this stage; empty if none does."""
        return os.environ.get(FORCE, "")

    def report(self, found: RunOutcome) -> None:
        """Tell how the run ended."""
        if self.outcomes is None:
            report_outcome(found)
        else:
            self.outcomes.append(found)

    def decide(self) -> Decision:
        """Whether the stage has work to do."""
        modules = (self.run_module, type(self.config).__module__)
        return decide(self.name, self.config, modules, self.force, self.forced_by)


def execute(job: StageInvocation) -> int:
    """Run a stage if it has work to do; returns 0 or raises."""
    with retry.waiting():
        return _execute(job)


def _execute(job: StageInvocation) -> int:
    # Waiting OpenMP threads spin, and starve each other if anything else needs a core: a training
    # step on two cores, one of them busy, takes 3.1 s with spinning and 0.65 s without.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    if ranks.is_delegated():
        return ranks.run_delegated(job.name, job.config, job.run_module)
    if hasattr(job.config, "check_ranks"):  # before inputs are checked and ranks are started
        job.config.check_ranks(ranks.num_ranks(job.config))
    if ranks.is_follower(job.config):
        return ranks.follow(job.name, job.config, job.run_module)
    with ranks.leading(job.config) as leader:
        run = StageRun(job.name, {}, job.config.output())
        _handle_signals(run)
        clear_reports()
        with _output_folder(run.output):
            _decide_and_run(job, run, leader)
    return 0


def _decide_and_run(job: StageInvocation, run: StageRun, leader: ranks.Leader) -> None:
    decision = job.decide()
    _adopt(run, decision, job.force or bool(job.forced_by))
    _check_output(job, run, decision)
    whole = _finished_whole(job, decision)
    if run.output is None:
        _check_inputs(job)
        leader.announce(run)
        try:
            ranks.run_here_or_spawn(job.config, run, job.run_module, job.arguments)
        finally:
            run.close()
    elif decision.manifest is not None and decision.reason is None:
        leader.announce(None)
        _tidy_after_a_kill(job, run, decision.manifest)
        if decision.remark:
            job.log.info("%s: %s", run.output.url, decision.remark)
        _report_noop(job, run.output, decision.manifest)
    elif whole is not None:
        leader.announce(None)
        _report_noop(job, whole[0], whole[1])
    else:
        _check_inputs(job)
        _run_claimed(job, run, leader, decision)


def _check_output(job: StageInvocation, run: StageRun, decision: Decision) -> None:
    """Let the stage refuse to replace what is there, unless the run is forced."""
    if decision.reason is None or run.is_forced or not job.check_module:
        return
    check = getattr(importlib.import_module(job.check_module), "check_output", None)
    if check is not None:
        digests = {name: found.digest for name, found in decision.inputs.items()}
        check(job.config, decision.lineage, digests)


def _check_inputs(job: StageInvocation) -> None:
    """Check the inputs before the stage's module imports torch, which takes seconds."""
    if job.check_module:
        importlib.import_module(job.check_module).check_inputs(job.config)


def _finished_whole(job: StageInvocation, decision: Decision) -> tuple[Output, Manifest] | None:
    """For a share: the whole output, if it was made from the same inputs, options and code."""
    whole = job.config.whole() if isinstance(job.config, MadeInShares) else None
    found = read_manifest(whole.manifest_url) if whole is not None and not job.force else None
    if whole is None or found is None or is_forced(found[0], job.forced_by):
        return None
    run = found[0].run
    lineages = (found[0].lineage, run.get(SHARES_LINEAGE), run.get(AS_SHARES))
    is_same = decision.lineage in lineages and found[0].code == decision.code
    is_same = is_same and missing_file(found[0], whole) is None
    return (whole, found[0]) if is_same else None


def _run_claimed(
    job: StageInvocation, run: StageRun, leader: ranks.Leader, decision: Decision
) -> None:
    assert run.output is not None
    if store.exists(run.output.url) and not run.output.is_prefix:
        raise ConfigError(
            f"{run.output.url}: this is a file; the output is a folder, choose another"
        )
    require_conditions(run.output.folder_url)
    began = time.time()
    claim = acquire(run.output.claim_url, job.claim_wait_seconds)
    try:
        slot = read_slot(run.output.manifest_url)
        if slot != decision.slot:  # another run finished, or was killed, while this one waited
            decision = job.decide()
        if decision.manifest is not None and decision.reason is None:
            leader.announce(None)
            job.log.info("another run finished this output in the meantime")
            _report_noop(job, run.output, decision.manifest)
            return
        _adopt(run, decision, job.force or bool(job.forced_by))
        _check_output(job, run, decision)
        run.claim = claim
        job.log.info("running because %s", run.reason)
        run.work.clean()
        leader.announce(run)
        try:
            metrics = ranks.run_here_or_spawn(job.config, run, job.run_module, job.arguments)
        finally:
            run.close()
        manifest = _manifest(job, decision, run, metrics, began)
        run.check_claim()
        publish(run.output.manifest_url, manifest, run.slot.version if run.slot else None)
        _remove_strays(job, run, manifest)
    finally:
        claim.release()
    _report_ran(job, run, manifest)


@contextmanager
def _output_folder(output: Output | None) -> Iterator[None]:
    """Make the folder of the output before inputs are read, which may take long; ConfigError if
    it cannot be made. It is removed again if the run leaves it empty."""
    path = None if output is None else local_path(output.folder_url)
    absent = [] if path is None else [at for at in (path, *path.parents) if not at.exists()]
    try:
        if absent:
            absent[0].mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, PermissionError) as error:
        raise ConfigError(
            f"{absent[0]}: this folder cannot be created ({error.strerror}); choose another place "
            "for the output"
        ) from error
    except OSError:
        pass  # such as a file in its place: writing has a message for each
    try:
        yield
    finally:
        _remove_empty(absent)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # not empty: something was written, by this run or another one
            return


def _adopt(run: StageRun, decision: Decision, force: bool) -> None:
    run.inputs, run.lineage, run.slot = decision.inputs, decision.lineage, decision.slot
    run.code, run.reason = decision.code["digest"], decision.reason or ""
    run.is_forced, run.shares_lineage = force, decision.shares_lineage
    run.manifests = decision.manifests


def _manifest(
    job: StageInvocation, decision: Decision, run: StageRun, metrics: dict[str, Any], began: float
) -> Manifest:
    system = os.uname()  # platform.platform() starts a program
    facts = {
        "seconds": round(time.time() - began, 3),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "reason": run.reason,
        **({"forced_by": job.forced_by} if job.forced_by else {}),
        **({SHARES_LINEAGE: decision.shares_lineage} if decision.shares_lineage else {}),
        **({AS_SHARES: decision.as_shares} if decision.as_shares else {}),
        CODE_FILES: decision.code_files,
        "python": sys.version.split()[0],
        "platform": "-".join((system.sysname, system.release, system.machine)),
        **run.libraries,
        **run.facts,
    }
    files = tuple(run.records[path] for path in sorted(run.records))
    parts = tuple(run.parts[path] for path in sorted(run.parts))
    return decision.new_manifest(job.name, files=files, parts=parts, metrics=metrics, run=facts)


def _report_noop(job: StageInvocation, output: Output, manifest: Manifest) -> None:
    digest = manifest.output_digest
    job.log.info("nothing to do, %s holds %s", output.url, digest[:12])
    job.report(RunOutcome("noop", "", output.manifest_url, digest))


def _report_ran(job: StageInvocation, run: StageRun, manifest: Manifest) -> None:
    assert run.output is not None
    digest, seconds = manifest.output_digest, manifest.run["seconds"]
    job.log.info("done in %.1f s, %s holds %s", seconds, run.output.url, digest[:12])
    job.report(RunOutcome("ran", run.reason, run.output.manifest_url, digest))


# --- leftovers of killed runs -----------------------------------------------------------------


def _tidy_after_a_kill(job: StageInvocation, run: StageRun, manifest: Manifest) -> None:
    """Remove the claim and work folder of a run that was killed after publishing."""
    assert run.output is not None
    if not store.exists(run.output.claim_url):
        return
    try:
        claim = acquire(run.output.claim_url, 0)
    except ClaimHeldError:
        return  # another run is writing here, and cleans up itself
    try:
        _remove_strays(job, run, manifest)
    finally:
        claim.release()


def _remove_strays(job: StageInvocation, run: StageRun, manifest: Manifest) -> None:
    """Remove files of earlier versions and of killed runs of this artifact, and spent shares."""
    assert run.output is not None
    earlier = set(run.slot.files if run.slot else ()) | run.work.final_names()
    in_parts = tuple(f"{part.path}/" for part in manifest.parts)  # those clear their own folders
    for path in sorted(earlier - {record.path for record in manifest.files}):
        if not path.startswith(in_parts):
            store.delete(run.output.file_url(path))
    if run.slot is not None:
        remove_others(run.output.folder_url, run.slot, manifest)
    begins = store.basename(run.output.url) if run.output.is_prefix else ""
    job.abandoned.delete(run.output.folder_url, begins)
    run.work.remove()
    for url in job.spent:
        store.delete_tree(url)


def _handle_signals(run: StageRun) -> None:
    for number in STOPPING:
        signal.signal(number, run.on_signal)
