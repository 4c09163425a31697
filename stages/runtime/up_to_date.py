"""Decides from manifests, without reading data, whether a stage has work to do, and why."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from stages.runtime.share_digests import DigestedInShares, of_raw_files
from trainyard.artifacts import store
from trainyard.artifacts.block_digest import MARK, BlockDigests, block_digest, version_mark
from trainyard.artifacts.code_digest import changed_files, code_digest, code_files
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import Input, Manifests, OfRaw, resolve
from trainyard.artifacts.manifest import (
    InputRecord,
    Manifest,
    ManifestSlot,
    read_manifest,
    read_slot,
)
from trainyard.artifacts.output import MANIFEST, Output
from trainyard.artifacts.parts import wrong_file
from trainyard.artifacts.urls import canonical_each, has_glob, is_local, join, lies_in
from trainyard.config import differing, digest_relevant, to_dict
from trainyard.errors import ArtifactError, ConfigError
from trainyard.version import VERSION

NO_HUB = "; names on a hub are not looked up: download the files, and give their folder"
A_CHECKPOINT = "; a checkpoint is the folder of a run or of its step iter_XXXXXXX"
HINTS = {
    "--tokenizer-model": NO_HUB,
    "--load": A_CHECKPOINT,
    "--load-dir": f"{A_CHECKPOINT}, or of Megatron-LM, Meta or Hugging Face",
    "--checkpoint": A_CHECKPOINT,
}
"""What an option takes, said where nothing is."""

MOST_NAMED = 5
"""Most changed files that a decision names."""


class StageConfig(Protocol):
    """The interface of a stage's configuration."""

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """URLs of each input, by name; an unused input is absent or empty."""

    def output(self) -> Output | None:
        """Where the stage writes; None when it only prints."""


@runtime_checkable
class MadeInShares(Protocol):
    """More methods for a stage whose output several runs can make in shares, which a last run joins
    (see `stages.tokenize`)."""

    def whole(self) -> Output | None:
        """For a share: the output it belongs to. If that exists, made from the same inputs, options
        and code, the share has nothing to do."""

    def spent(self) -> tuple[str, ...]:
        """For the whole: folders of shares, removed once it is published."""


@runtime_checkable
class NamesInputs(Protocol):
    """One more method for a stage whose output may name the places of its inputs."""

    def names_inputs(self) -> bool:
        """Whether it does. Inputs at other places then run the stage again."""


@runtime_checkable
class MadeByVersions(Protocol):
    """One more method for a stage whose output depends on the version of a library."""

    def versions(self) -> dict[str, str]:
        """Name and version of each such library. Another version runs the stage again."""


@runtime_checkable
class Continuable(Protocol):
    """Methods of a stage whose output can continue under other options, and costs too much to be
    rebuilt after a change of code (see `stages.pretrain`)."""

    def identity(self) -> dict[str, Any]:
        """The options that make the output the one it is; unfinished work is shared under these."""

    def code_change(self) -> Literal["keep", "redo"]:
        """What to do if only the code has changed since the output was finished."""


CODE_FILES = "code_files"
"""Key in the `run` of a manifest: digests of the sources, by which a change is named."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The inputs of a run, and the reason to run."""

    inputs: dict[str, Input]
    config: dict[str, Any]
    """The options that affect the output."""
    code: dict[str, str]
    """Version and digest of trainyard's sources, and versions of libraries that affect the output.
    """
    code_files: dict[str, str]
    """Digests of the sources, by which a later run names the files that changed."""
    lineage: str
    reason: str | None
    """Why the stage runs; None if the output is up to date."""
    slot: ManifestSlot | None
    manifest: Manifest | None
    remark: str = ""
    """What has changed without being a reason to run; empty: nothing."""
    shares_lineage: str = ""
    """That of the shares to join, if they go by versions of the input; otherwise empty."""
    as_shares: str = ""
    """The same for a run without shares that could have some."""
    manifests: Manifests = field(default_factory=Manifests)
    """What was read of the inputs' manifests."""

    def new_manifest(self, stage: str, **rest: Any) -> Manifest:
        """The manifest of the run after this decision."""
        records = {name: InputRecord(i.urls, i.digest) for name, i in self.inputs.items()}
        return Manifest(
            stage=stage,
            lineage=self.lineage,
            code=self.code,
            config=self.config,
            config_digest=digest_document(self.config),
            inputs=records,
            **rest,
        )


def decide(
    stage: str, config: StageConfig, modules: Sequence[str], force: bool, forced_by: str = ""
) -> Decision:
    """Resolve the inputs, and compare them, the options and the code with the existing manifest.

    forced_by: id of the flow run that forces the stage; empty: none does.
    Raises ArtifactError for an input that does not exist."""
    versions = config.versions() if isinstance(config, MadeByVersions) else {}
    manifests, output = Manifests(), config.output()
    recorded = _recorded_digests(config, output)
    of_raw = of_raw_files(stage, config, recorded)
    inputs = {
        name: _resolved(name, urls, config, manifests, of_raw.get(name), (recorded or {}).get(name))
        for name, urls in config.inputs().items()
        if urls
    }
    options = digest_relevant(config)
    continuable = config if isinstance(config, Continuable) else None
    files = code_files(*modules)
    code = {"version": VERSION, "digest": code_digest(*modules), **versions}
    made_of = [stage, continuable.identity() if continuable else options]

    def lineage_of(inputs: dict[str, Input]) -> str:
        digests = {name: i.digest for name, i in inputs.items()}
        return digest_document([*made_of, digests, *([versions] if versions else [])])

    def lineage_of_shares() -> str:
        assert isinstance(config, DigestedInShares)
        by_version = {
            name: _resolved(name, inputs[name].urls, config, manifests, version_mark)
            for name in config.digested_inputs()
            if name in inputs
        }
        return lineage_of({**inputs, **by_version})

    lineage, of_shares, as_shares = lineage_of(inputs), "", ""
    if output is None:
        return Decision(inputs, options, code, files, lineage, "it only prints", None, None)
    found = read_manifest(output.manifest_url)
    slot = read_slot(output.manifest_url)
    refuse_overlap(output, slot, inputs)
    manifest = found[0] if found else None
    if manifest is not None and manifest.stage != stage:
        raise ConfigError(
            f"{output.url}: this is an artifact of {manifest.stage}, which {stage} would replace; "
            f"choose another output, or remove it first"
        )
    changed_code = "" if manifest is None else _changed_code(manifest, code, files)
    keeps = continuable is not None and continuable.code_change() == "keep"
    relevant_code = "" if keeps else changed_code
    reason = _reason(manifest, slot, inputs, options, differing(config), relevant_code, output)
    remark = ""
    if reason is None and changed_code and manifest is not None:
        remark = (
            f"made by version {manifest.code.get('version')}, and since then {changed_code}; a "
            "change of code alone makes nothing again: --force or --on-code-change redo does"
        )
    if reason is None and isinstance(config, NamesInputs) and config.names_inputs():
        assert manifest is not None, "without a manifest there is a reason"
        reason = _moved_input(manifest, inputs)
    if force:
        reason = "--force was given"
    elif reason is None and manifest is not None and is_forced(manifest, forced_by):
        reason = "the flow run forces it"
    if isinstance(config, DigestedInShares) and config.rank is None:
        if config.world_size:
            of_shares = lineage_of_shares()
        elif reason is not None and config.can_be_shared():
            as_shares = lineage_of_shares()
    return Decision(
        inputs,
        options,
        code,
        files,
        lineage,
        reason,
        slot,
        manifest,
        remark,
        of_shares,
        as_shares,
        manifests,
    )


def _recorded_digests(config: StageConfig, output: Output | None) -> dict[str, str] | None:
    """The digests of inputs in the manifest of an output that shares or a join may make; None if
    there is none."""
    if output is None or not isinstance(config, DigestedInShares) or config.rank is not None:
        return None
    found = read_manifest(output.manifest_url)
    return {n: one.digest for n, one in found[0].inputs.items()} if found is not None else None


def is_forced(manifest: Manifest, forced_by: str) -> bool:
    """Whether a flow run forces the stage and did not make this artifact itself."""
    return bool(forced_by) and manifest.run.get("forced_by") != forced_by


def _resolved(
    name: str,
    urls: tuple[str, ...],
    config: StageConfig,
    manifests: Manifests,
    of_raw: OfRaw | None,
    recorded: str | None = None,
) -> Input:
    """An input; an error names the option of the missing file. recorded: the digest in the manifest
    of the output; earlier versions marked any that was taken by blocks."""
    taken = BlockDigests() if of_raw is block_digest else None
    try:
        found = resolve(name, urls, manifests, taken or of_raw)
        if taken is None or not (taken.in_blocks or recorded == MARK + found.digest):
            return found
        return replace(found, digest=MARK + found.digest)
    except ArtifactError as error:
        url = next((url for url in urls if str(error).startswith(f"{url}: ")), None)
        if url is None:
            raise
        option = _option_of(url, name, config)
        is_absent = is_local(url) and "no file matches" in str(error)
        hint = HINTS.get(option, "") if is_absent else ""
        raise ArtifactError(f"{option} {error}{hint}".lstrip()) from error


def _option_of(url: str, name: str, config: StageConfig) -> str:
    """The option that gave a URL of an input; empty for a URL that no option gave."""
    options = to_dict(config)
    given = (k for k, v in options.items() if url == v or (isinstance(v, list) and url in v))
    key = next(given, name if name in options else None)
    return "--" + key.replace("_", "-") if key else ""


def _reason(
    manifest: Manifest | None,
    slot: ManifestSlot | None,
    inputs: dict[str, Input],
    options: dict[str, Any],
    given: Collection[str],
    changed_code: str,
    output: Output,
) -> str | None:
    if manifest is None:
        return "a run that was replacing it did not finish" if slot else "there is no manifest yet"
    return (
        _changed_input(manifest, inputs)
        or _changed_option(manifest.config, options, given)
        or changed_code
        or missing_file(manifest, output)
    )


def refuse_overlap(output: Output, slot: ManifestSlot | None, inputs: dict[str, Input]) -> None:
    """Refuse an output that would overwrite an input, or become part of one."""
    if output.names and slot is not None:  # files of an earlier run are removed
        output = replace(output, names=(*output.names, *slot.files))
    for found in inputs.values():
        overwritten = output.first_written((*found.urls, *found.files)) or next(
            (url for url in found.urls if has_glob(url) and output.is_matched_by(url)), None
        )
        if overwritten is not None:
            raise ConfigError(
                f"{output.url}: the output would overwrite {_named(found)} ({overwritten}); "
                "choose another place for the output"
            )
        for url in _folders(found):
            if lies_in(output.url, url) and read_slot(join(url, MANIFEST)) is None:
                raise ConfigError(
                    f"{output.url}: the output would lie in {_named(found)} ({url}) and be read "
                    "with it next time; choose another place for the output"
                )


def _named(found: Input) -> str:
    return "the input" if found.name == "input" else f"input {found.name}"


def _folders(found: Input) -> Iterator[str]:
    """The URLs of an input that are folders of its files. Binary search, since an input may list
    thousands of files."""
    files = sorted(found.files)
    for url in found.urls:
        below = url.rstrip("/") + "/"
        first = bisect_left(files, below)
        if first < len(files) and files[first].startswith(below):
            yield url


def _changed_input(manifest: Manifest, inputs: dict[str, Input]) -> str | None:
    for name in sorted(manifest.inputs.keys() | inputs.keys()):
        before, now = manifest.inputs.get(name), inputs.get(name)
        if before is None or now is None:
            return f"input {name} was {'added' if before is None else 'removed'}"
        if before.digest != now.digest:
            where = ", ".join(now.urls[:2]) + (", ..." if len(now.urls) > 2 else "")
            return f"{_named(now)} changed ({where}: {before.digest[:8]} -> {now.digest[:8]})"
    return None


def _moved_input(manifest: Manifest, inputs: dict[str, Input]) -> str | None:
    for name, now in inputs.items():
        before = manifest.inputs[name].urls
        if list(canonical_each(before)) != list(canonical_each(now.urls)):
            return f"{_named(now)} moved ({', '.join(before[:2])} -> {', '.join(now.urls[:2])})"
    return None


def _changed_option(
    before: dict[str, Any], now: dict[str, Any], given: Collection[str]
) -> str | None:
    """given: options that are not at their default. An option that an earlier version did not have
    has not changed while it is at its default."""
    keys = before.keys() | now.keys() & given
    changed = [key for key in sorted(keys) if before.get(key) != now.get(key)]
    if not changed:
        return None
    key = changed[0]
    rest = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    flag = "--" + key.replace("_", "-")
    return f"option {flag} changed ({before.get(key)!r} -> {now.get(key)!r}){rest}"


def _changed_code(manifest: Manifest, now: dict[str, str], files: dict[str, str]) -> str:
    """What has changed in the code, naming the files; empty if nothing has."""
    before = manifest.code
    for name in sorted(now.keys() - {"version", "digest"}):
        if name in before and before[name] != now[name]:
            return f"the version of {name} changed ({before[name]} -> {now[name]})"
    if before.get("digest") == now["digest"] and before.get("version") == now["version"]:
        return ""
    what = f"{before.get('digest', '')[:8]} -> {now['digest'][:8]}"
    if before.get("version") != now["version"]:
        what = f"version {before.get('version')} -> {now['version']}"
    known = manifest.run.get(CODE_FILES)
    named = changed_files(known, files) if isinstance(known, dict) else []
    return f"the code changed ({what}{_listed(named)})"


def _listed(files: Sequence[str]) -> str:
    rest = f" and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
    return f": {', '.join(files[:MOST_NAMED])}{rest}" if files else ""


def missing_file(manifest: Manifest, output: Output) -> str | None:
    """A file that is missing or has another size; found by listing, without reading."""
    if output.is_prefix:
        urls = {f.path: output.file_url(f.path) for f in manifest.files}
        sizes = {p: store.info(url).size_bytes for p, url in urls.items() if store.exists(url)}
    else:
        sizes = store.list_files(output.url)
    try:
        path = wrong_file(output.folder_url, manifest, sizes)
    except ArtifactError as error:
        return str(error)
    if path is None:
        return None
    return f"output file {path} {'has another length' if path in sizes else 'is gone'}"
