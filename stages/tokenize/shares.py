"""Fan-out: joins the shares of several ranks, each a separate artifact, to the bytes of one run.

A share is written under PREFIX.shares, as PREFIX_KEY_document.bin and so on would be; its lines are
counted from where it begins in a file, and `.share.json` says how many it saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from stages.runtime.context import StageRun
from stages.runtime.joined_shares import share_manifests
from stages.tokenize.assemble import Totals, check_bad_lines, refuse_nothing, write_bad_line
from stages.tokenize.config import TokenizeConfig
from trainyard import json_text
from trainyard.artifacts import store
from trainyard.artifacts.manifest import Manifest
from trainyard.artifacts.urls import canonical
from trainyard.corpus.merge import merge_index, merge_tokens, survey
from trainyard.corpus.pairs import BAD_LINES, SHARE, SUMS
from trainyard.corpus.provenance.origins import SidecarPart, join_provenance
from trainyard.corpus.sums import BlockDigests
from trainyard.errors import ArtifactError, ConfigError

FORMAT_VERSION = 1


def write_share(stage: StageRun, totals: Totals) -> None:
    """Write the totals of a share, which the join needs."""
    stage.write_json(SHARE, {"format_version": FORMAT_VERSION, **asdict(totals)})


def check_files(files: Sequence[str]) -> None:
    """Refuse to fan out an input that lists a file twice: its line numbers would be ambiguous."""
    twice = [file for file, count in Counter(files).items() if count > 1]
    if twice:
        raise ConfigError(
            f"--world-size: --input names {twice[0]} twice; with several ranks a file is listed "
            "once (blend the token files by weight instead, or run without --world-size)"
        )


def join_shares(config: TokenizeConfig, stage: StageRun, files: Sequence[str]) -> Totals:
    """The shares of all ranks, laid end to end; `files` are those they were made of."""
    share_manifests(
        *(stage, config.all_shares(), "tokenize"),
        partial(_other_version, versions=config.versions()),
    )
    prefixes = [share.url for share in config.all_shares()]
    shares = [_read_share(prefix) for prefix in prefixes]
    totals = _add_up(config, shares)
    refuse_nothing(config, totals)
    shifts = _line_shifts(shares, files)
    if config.on_bad_line == "skip":
        _join_bad_lines(config, stage, prefixes, shifts)
    for key in config.json_keys:
        _join_key(config.file_stem(key), stage, prefixes, shifts)
    return totals


def _other_version(share: Manifest, versions: Mapping[str, str]) -> str | None:
    """Which library made a share in another version than this run's; None if none did."""
    for name, version in versions.items():
        found = share.code.get(name, version)
        if found != version:
            return f"made with {name} {found}, and this run has {version}"
    return None


def _read_share(prefix: str) -> Totals:
    document = store.read_json(prefix + SHARE)
    try:
        if document.pop("format_version") != FORMAT_VERSION:
            raise ValueError("of another version")
        return Totals(**document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{prefix}{SHARE}: not the record of a share ({error})") from error


def _add_up(config: TokenizeConfig, shares: Sequence[Totals]) -> Totals:
    whole = Totals(
        documents=sum(share.documents for share in shares),
        validated=sum(share.validated for share in shares),
        bad_lines=sum(share.bad_lines for share in shares),
    )
    for key in config.json_keys:
        whole.tokens[key] = sum(share.tokens[key] for share in shares)
        whole.sequences[key] = sum(share.sequences[key] for share in shares)
    return whole


def _line_shifts(shares: Sequence[Totals], files: Sequence[str]) -> list[dict[str, int]]:
    """For each share, by file: the lines of it that earlier shares saw."""
    seen: Counter[str] = Counter()
    shifts = []
    for share in shares:
        shifts.append(
            {canonical(files[int(number)]): seen[number] for number in share.lines if seen[number]}
        )
        seen.update(share.lines)
    return shifts


def _join_key(
    stem: str, stage: StageRun, prefixes: Sequence[str], shifts: Sequence[dict[str, int]]
) -> None:
    pairs = survey([prefix + stem for prefix in prefixes], stage.scratch)
    size = sum(pair.bin_bytes for pair in pairs)
    with stage.open(stem + ".bin") as out, stage.progress(size, "bytes", "join") as progress:
        sums = BlockDigests(out)
        merge_tokens(pairs, out, progress.update)
    with stage.open(stem + ".idx") as out:
        merge_index(pairs, stage.scratch, out)
    with stage.open(stem + SUMS, volatile=True) as out:
        sums.write(out)
    origins = [
        SidecarPart(prefix + stem + ".docs", shift)
        for prefix, shift in zip(prefixes, shifts, strict=True)
    ]
    with stage.open(stem + ".docs", volatile=True) as out:
        join_provenance(origins, out, stage.scratch)


def _join_bad_lines(
    config: TokenizeConfig,
    stage: StageRun,
    prefixes: Sequence[str],
    shifts: Sequence[dict[str, int]],
) -> None:
    count = 0
    with stage.open(BAD_LINES, volatile=True) as out:
        for prefix, shift in zip(prefixes, shifts, strict=True):
            with store.open_input(prefix + BAD_LINES) as lines:
                for line in lines:
                    bad: dict[str, Any] = json_text.loads(line)
                    bad["line"] += shift.get(bad["source"], 0)
                    count += 1
                    check_bad_lines(config, count, bad, partial(_place, bad))
                    write_bad_line(out, bad)


def _place(bad: dict[str, Any]) -> str:
    return f"{bad['source']}: line {bad['line']} (byte {bad['offset']})"
