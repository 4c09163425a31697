"""Finds what killed runs leave in the store: stale claims, unfinished work and outputs, temporary
files, incomplete uploads."""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from flows.gc.contents import Claimed, Contents, holding, remove_files
from flows.gc.policy import DAY, HOUR, Garbage, Policy, age
from flows.gc.references import Collectable, Use, in_use, uses_of
from trainyard.artifacts import conditional, store
from trainyard.artifacts.claim import Holder
from trainyard.artifacts.leftovers import ListedFile, abort, uploads
from trainyard.artifacts.output import FINAL_NAMES, WORK
from trainyard.artifacts.urls import basename, parent
from trainyard.errors import ArtifactError, ClaimHeldError

log = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
STEP = re.compile(r"(?:^|/)iter_\d{7,}$")


def stale_claims(contents: Contents) -> Iterator[Garbage]:
    """Claims without a living holder."""
    for claim in contents.claims:
        if not claim.is_live:
            url = contents.url(claim.entry.name)
            yield Garbage(
                kind="stale claim",
                url=url,
                size_bytes=claim.entry.size_bytes,
                why=f"not renewed for {age(claim.entry.age_seconds)}",
                remove=partial(_remove_claim, url, claim),
            )


def _remove_claim(url: str, claim: Claimed) -> None:
    """Take over a claim, then remove it; ClaimHeldError if its holder renewed it."""
    found = conditional.read_version(url)
    if found is None:
        return
    ours = conditional.replace_if_match(url, Holder.of_this_process().encode(0), found[1])
    if ours is None:
        raise ClaimHeldError(f"{url}: renewed in the meantime, so its holder is alive")
    store.delete(url)


def unfinished_work(contents: Contents, policy: Policy) -> Iterator[Garbage]:
    """Work folders that no run has written to for `attempt_days`, with the final files of outputs
    that have no manifest."""
    listed = {name for artifact in contents.artifacts for name in artifact.files}
    whole = {a.base.rstrip("/") for a in contents.artifacts if a.manifest is not None}
    for folder, files in sorted(_work_folders(contents).items()):
        base = _output_of(folder)
        seconds = min(entry.age_seconds for entry in files)
        is_busy = contents.is_at_work(f"{base}/") or contents.is_at_work(base)
        if is_busy or seconds < policy.attempt_days * DAY:
            continue
        begun = [] if base in whole else _begun(contents, folder, files)
        names = [entry.name for entry in files] + [n for n in begun if n not in listed]
        yield Garbage(
            kind="unfinished work",
            url=contents.url(folder),
            size_bytes=contents.size(names),
            why=f"not resumed for {age(seconds)}",
            remove=partial(_remove_held, contents, _base_of(folder), names),
        )


def _remove_held(contents: Contents, base: str, names: Sequence[str]) -> None:
    with holding(contents, base):
        remove_files(contents, names)


def _work_folders(contents: Contents) -> dict[str, list[ListedFile]]:
    found: dict[str, list[ListedFile]] = defaultdict(list)
    for entry in contents.entries:
        parts = entry.name.split("/")
        depth = next((n for n, part in enumerate(parts[:-1]) if _is_work(part)), None)
        if depth is not None:
            found["/".join(parts[: depth + 1])].append(entry)
    return found


def _is_work(part: str) -> bool:
    return part == WORK or part.endswith(WORK)


def _output_of(folder: str) -> str:
    """The output of a work folder: a folder, or a prefix."""
    return parent(folder) if basename(folder) == WORK else folder.removesuffix(WORK)


def _base_of(folder: str) -> str:
    """The prefix of the names of that output's files."""
    return _output_of(folder) + ("/" if basename(folder) == WORK else "")


def _begun(contents: Contents, folder: str, files: Sequence[ListedFile]) -> list[str]:
    """The existing final files that killed runs recorded before they wrote them."""
    base = _base_of(folder)
    records = [e.name for e in files if basename(e.name).startswith(FINAL_NAMES)]
    names = {base + name for record in records for name in _names_in(contents.url(record))}
    return sorted(names & contents.sizes.keys())


def _names_in(url: str) -> list[str]:
    """The names in a record of final files; none if it is broken, and those files stay."""
    try:
        document = store.read_json(url)
    except ArtifactError as error:
        log.warning("the files that it names are left: %s", error)
        return []
    names = document if isinstance(document, list) else []
    return [name for name in names if isinstance(name, str)]


def abandoned_outputs(contents: Contents, policy: Policy) -> Iterator[Garbage]:
    """Artifacts that a run began to replace, and steps of a training without a manifest."""
    units = [*_replaced(contents, policy), *_steps(contents, policy)]
    kept = in_use(units, _uses(contents, units), contents.root)
    for unit in units:
        if unit.place not in kept:
            seconds = min(contents.age(name) for name in unit.names)
            yield Garbage(
                kind="abandoned output",
                url=contents.url(unit.place),
                size_bytes=contents.size(unit.names),
                why=f"begun {age(seconds)} ago and never finished",
                remove=partial(_remove_in_order, contents, unit),
            )


def _uses(contents: Contents, units: Sequence[Collectable]) -> list[Use]:
    theirs = {artifact for unit in units for artifact in map(id, unit.artifacts)}
    return uses_of(a for a in contents.artifacts if id(a) not in theirs)


def _replaced(contents: Contents, policy: Policy) -> Iterator[Collectable]:
    """Marks of manifests that are being replaced, with their files."""
    for artifact in contents.artifacts:
        if artifact.manifest is not None or not artifact.files:
            continue
        names = (*(n for n in artifact.files if n in contents.sizes), artifact.manifest_name)
        if _is_abandoned(contents, names, artifact.base, policy):
            yield Collectable(artifact.base, names, (artifact,))


def _steps(contents: Contents, policy: Policy) -> Iterator[Collectable]:
    """Step folders without a manifest beside steps with one; other formats never have one."""
    steps: dict[str, list[str]] = defaultdict(list)
    for entry in contents.entries:
        found = STEP.search(parent(entry.name))
        if found:
            steps[parent(entry.name)].append(entry.name)
    ours = {a.base.rstrip("/") for a in contents.artifacts}
    trainings = {parent(step) for step in steps if step in ours}
    for step, names in steps.items():
        if step in ours or parent(step) not in trainings:
            continue
        if _is_abandoned(contents, names, step + "/", policy):
            yield Collectable(step, tuple(names), ())


def _is_abandoned(contents: Contents, names: Iterable[str], base: str, policy: Policy) -> bool:
    seconds = min(contents.age(name) for name in names)
    return not contents.is_at_work(base) and seconds >= policy.attempt_days * DAY


def _remove_in_order(contents: Contents, unit: Collectable) -> None:
    """Remove the files, and last the mark that lists them."""
    marks = [artifact.manifest_name for artifact in unit.artifacts]
    # A step is written under the claim of its training.
    base = unit.artifacts[0].base if marks else parent(unit.place) + "/"
    with holding(contents, base):
        remove_files(contents, [name for name in unit.names if name not in marks])
        remove_files(contents, marks)


def temporary_files(contents: Contents, policy: Policy) -> Iterator[Garbage]:
    """Files whose writer died before it finished them."""
    for entry in contents.entries:
        parts = entry.name.split("/")
        if not any(part.startswith(TEMPORARY) for part in parts) or any(map(_is_work, parts[:-1])):
            continue
        is_old = entry.age_seconds >= policy.upload_hours * HOUR
        if store.is_abandoned(entry.name) or (is_old and not contents.is_at_work(entry.name)):
            yield Garbage(
                kind="temporary file",
                url=contents.url(entry.name),
                size_bytes=entry.size_bytes,
                why=f"not written to for {age(entry.age_seconds)}",
                remove=partial(remove_files, contents, [entry.name]),
            )


def open_uploads(contents: Contents, policy: Policy) -> Iterator[Garbage]:
    """Old incomplete uploads outside the outputs of living runs."""
    for upload in uploads(contents.root):
        name = upload.url.removeprefix(contents.root.rstrip("/") + "/")
        if upload.age_seconds >= _keep_upload_seconds(contents, name, policy):
            yield Garbage(
                kind="unfinished upload",
                url=upload.url,
                size_bytes=upload.size_bytes,
                why=f"begun {age(upload.age_seconds)} ago",
                remove=partial(abort, upload),
            )


def _keep_upload_seconds(contents: Contents, name: str, policy: Policy) -> float:
    """How old an upload to this name may be; one whose parts were made by shares waits for the
    join as long as other unfinished work."""
    shares = f"{name.removesuffix('.bin')}.shares"
    if contents.is_at_work(name) or contents.has_work_in(shares):
        return math.inf
    return policy.attempt_days * DAY if contents.below(shares) else policy.upload_hours * HOUR
