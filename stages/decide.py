"""Whether a stage has anything to do, and if so why: from manifests alone, without reading data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainyard.artifacts import store
from trainyard.artifacts.code import code_digest
from trainyard.artifacts.digest import digest_document
from trainyard.artifacts.inputs import Input, resolve
from trainyard.artifacts.manifest import InputRecord, Manifest, Slot, read_manifest, read_slot
from trainyard.artifacts.output import MANIFEST, Output
from trainyard.artifacts.urls import has_glob, join, lies_in
from trainyard.config import digest_relevant
from trainyard.errors import ConfigError
from trainyard.version import VERSION


class StageConfig(Protocol):
    """What the command line asks of a stage's configuration."""

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Name of each input to its URLs; an unused one is absent or empty."""

    def output(self) -> Output | None:
        """Where the stage writes; None when it only prints."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a run would be made of, and the reason to make it."""

    inputs: dict[str, Input]
    config: dict[str, Any]
    """The part of the configuration that decides what is made."""
    code: dict[str, str]
    lineage: str
    reason: str | None
    """Why there is work; None when the output is there already."""
    slot: Slot | None
    manifest: Manifest | None

    def new_manifest(self, stage: str, **rest: Any) -> Manifest:
        """The manifest of a run that this decision started."""
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


def decide(stage: str, config: StageConfig, modules: Sequence[str], force: bool) -> Decision:
    """Resolve the inputs and compare them, the options and the code with the manifest that is
    there.

    Raises ArtifactError for an input that does not exist."""
    inputs = {name: resolve(name, urls) for name, urls in config.inputs().items() if urls}
    options = digest_relevant(config)
    code = {"version": VERSION, "digest": code_digest(*modules)}
    lineage = digest_document([stage, options, {name: i.digest for name, i in inputs.items()}])
    output = config.output()
    if output is None:
        return Decision(inputs, options, code, lineage, "it only prints", None, None)
    found = read_manifest(output.manifest_url)
    slot = read_slot(output.manifest_url)
    _refuse_overlap(output, slot, inputs)
    manifest = found[0] if found else None
    if manifest is not None and manifest.stage != stage:
        raise ConfigError(
            f"{output.url}: this is an artifact of {manifest.stage}, which {stage} would replace; "
            f"choose another place, or remove it first"
        )
    reason = _reason(manifest, slot, inputs, options, code, output)
    reason = "--force was given" if force else reason
    return Decision(inputs, options, code, lineage, reason, slot, manifest)


def _reason(
    manifest: Manifest | None,
    slot: Slot | None,
    inputs: dict[str, Input],
    options: dict[str, Any],
    code: dict[str, str],
    output: Output,
) -> str | None:
    if manifest is None:
        return "a run that was replacing it did not finish" if slot else "there is no manifest yet"
    return (
        _changed_input(manifest, inputs)
        or _changed_option(manifest.config, options)
        or _changed_code(manifest.code, code)
        or _missing_file(manifest, output)
    )


def _refuse_overlap(output: Output, slot: Slot | None, inputs: dict[str, Input]) -> None:
    """Refuse an output that would overwrite an input, or become part of one."""
    if output.names and slot is not None:  # what an earlier run left is removed
        output = replace(output, names=(*output.names, *slot.files))
    for found in inputs.values():
        for url in (*found.urls, *found.files):
            if output.may_write(url) or (has_glob(url) and output.is_matched_by(url)):
                raise ConfigError(
                    f"{output.url}: the output would lie over input {found.name} ({url}); "
                    "choose another place for the output"
                )
        for url in found.urls:
            raw_folder = any(file.startswith(url.rstrip("/") + "/") for file in found.files)
            if raw_folder and lies_in(output.url, url) and read_slot(join(url, MANIFEST)) is None:
                raise ConfigError(
                    f"{output.url}: the output would lie in input {found.name} ({url}) and be read "
                    "with it next time; choose another place for the output"
                )


def _changed_input(manifest: Manifest, inputs: dict[str, Input]) -> str | None:
    for name in sorted(manifest.inputs.keys() | inputs.keys()):
        before, now = manifest.inputs.get(name), inputs.get(name)
        if before is None or now is None:
            return f"input {name} was {'added' if before is None else 'removed'}"
        if before.digest != now.digest:
            where = ", ".join(now.urls[:2]) + (", ..." if len(now.urls) > 2 else "")
            what = "the input" if name == "input" else f"input {name}"
            return f"{what} changed ({where}: {before.digest[:8]} -> {now.digest[:8]})"
    return None


def _changed_option(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if not changed:
        return None
    key = changed[0]
    rest = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    flag = "--" + key.replace("_", "-")
    return f"option {flag} changed ({before.get(key)!r} -> {now.get(key)!r}){rest}"


def _changed_code(before: dict[str, str], now: dict[str, str]) -> str | None:
    if before.get("version") != now["version"]:
        return f"the code changed (version {before.get('version')} -> {now['version']})"
    if before.get("digest") != now["digest"]:
        return f"the code changed ({before.get('digest', '')[:8]} -> {now['digest'][:8]})"
    return None


def _missing_file(manifest: Manifest, output: Output) -> str | None:
    """A file that is gone or has another length; found by listing, nothing is read."""
    if output.is_prefix:
        sizes = {f.path: _size(output.file_url(f.path)) for f in manifest.files}
    else:
        sizes = dict(store.list_files(output.url))
    for record in manifest.files:
        if sizes.get(record.path) != record.size_bytes:
            gone = sizes.get(record.path) is None
            return f"output file {record.path} {'is gone' if gone else 'has another length'}"
    return None


def _size(url: str) -> int | None:
    return store.info(url).size_bytes if store.exists(url) else None
