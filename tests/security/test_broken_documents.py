"""Documents that others wrote or broke end in a message, and stop no sweep."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.backends.events import FILE, read_events
from flows.backends.kubernetes.client import UnavailableError, _event
from flows.backends.outcome import read_failure, read_outcome
from flows.backends.run_folder import SUBMITTED, read_record
from flows.backends.slurm.job import _exit_code
from flows.gc.contents import holder_of
from flows.gc.sweep import Swept, sweep
from flows.logs.lines import Followed
from flows.pages.charts import loss_curve
from flows.recipes.corpus_versions import CURRENT, read_pointer
from stages.merge import shares as merge_shares
from stages.runtime import share_digests
from tests.flows.gc.yards import AT_ONCE, Corpus
from trainyard import json_text
from trainyard.artifacts import store
from trainyard.artifacts.block_digest import remember_digest
from trainyard.artifacts.inputs import raw_digest
from trainyard.config_text import parse_document
from trainyard.errors import ArtifactError, ConfigError, TrainyardError
from trainyard.tokenizers.chat import templates

ROOT = Path(__file__).resolve().parents[2]
DEEP = 20_000

BROKEN = {
    "empty": "",
    "no JSON": "\0\0\0",
    "lists in lists": "[" * DEEP,
    "lists that end": "[" * DEEP + "]" * DEEP,
    "tables in tables": '{"a":' * DEEP,
    "a long number": "9" * DEEP,
    "a number": "7",
    "nothing": "null",
    "a list": '[1, "../../outside", null, {}]',
    "a table of others": '{"format_version": 1, "sources": 3, "version": 5, "files": 7}',
    "NaN": "[NaN]",
    "half": '{"format_version": 1, "sour',
}
every_break = pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)


@every_break
def test_every_fault_of_a_text_is_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        json_text.loads(text)


READERS: dict[str, Callable[[Path], Any]] = {
    "failure.json": lambda folder: read_failure(str(folder)),
    "outcome.json": lambda folder: read_outcome(str(folder)),
    FILE: read_events,
    "exit.json": lambda folder: _exit_code(folder / "exit.json", "7"),
    "followed.json": lambda folder: list(Followed(folder).read("log.txt")),
}
"""Files of a run folder whose loss is no error."""


@pytest.mark.few_cases(16)
@every_break
@pytest.mark.parametrize("name", READERS)
def test_a_broken_file_of_a_run_folder_is_none(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    READERS[name](tmp_path)


@every_break
def test_a_broken_record_of_a_job_is_a_message(text: str, tmp_path: Path) -> None:
    (tmp_path / SUBMITTED).write_text(text)
    with pytest.raises(ConfigError, match="is not a record of trainyard"):
        read_record(tmp_path / SUBMITTED, "merge")


@every_break
def test_a_broken_pointer_to_a_corpus_is_a_message(text: str, tmp_path: Path) -> None:
    (tmp_path / CURRENT).write_text(text)
    with pytest.raises(ArtifactError, match="not a pointer to a corpus version"):
        read_pointer(str(tmp_path / CURRENT))


@pytest.mark.parametrize("name", sorted(BROKEN.keys() - {"empty"}))
def test_a_broken_ledger_has_no_picture_but_a_message(name: str) -> None:
    with pytest.raises(ArtifactError, match="line 1 is not a step"):
        loss_curve(BROKEN[name].encode(), "ledger.jsonl", "x")


@every_break
def test_a_broken_change_of_a_watch_is_a_lost_connection(text: str) -> None:
    with pytest.raises(UnavailableError, match="a watch sent something that is not a change"):
        _event(text.encode())


@every_break
def test_a_broken_claim_has_no_holder_or_one(text: str) -> None:
    holder_of(text.encode())


@pytest.mark.parametrize("name", ["lists in lists", "tables in tables", "half"])
def test_broken_settings_of_a_tokenizer_are_a_message(name: str) -> None:
    with pytest.raises(ArtifactError, match="is not a JSON document"):
        templates._settings(
            {"tokenizer_config.json": BROKEN[name].encode()}, "tokenizer_config.json"
        )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("suffix", [".json", ".yaml", ".toml"])
@pytest.mark.parametrize("text", ["[" * DEEP, "a = " + "[" * DEEP, '{"a":' * DEEP])
def test_a_deep_configuration_is_a_message(suffix: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"not well-formed|must be a table|nested too deeply"):
        parse_document(text, suffix, "recipe")


# --- a sweep ----------------------------------------------------------------------------------

NOTES = [
    "other/current.json",
    "other/versions/0001-abc/version.json",
    "other/versions/0003-abc/version.json",
    "other/versions/\u00b2-abc/version.json",
    "we{b}/current.json",
    "gpt/claim",
    "gpt.claim",
    "gpt/manifest.json",
    "gpt.manifest.json",
    "gpt/jobs.json",
    "gpt/iter_0000100/config.json",
    "begun.work/final-abc.json",
    "begun/.work/final-abc.json",
    ".runs/merge/20260101-000000-abcdef/config.toml",
    ".runs/merge/20260101-000000-abcdef/events.jsonl",
    ".runs/merge/20260101-000000-abcdef/settled.json",
]
"""Files of a yard that a sweep reads."""


def swept(root: Path) -> Swept:
    return sweep(str(root), [root / ".runs"], AT_ONCE, remove=True)


def yard_with(root: Path, notes: list[str], text: str) -> None:
    """A yard of three corpora, with these notes broken."""
    for corpus in (Corpus(str(root)), Corpus(str(root), "other"), Corpus(str(root), "we{b}")):
        corpus.publish("a")
        corpus.publish("b")
    for note in notes:
        (root / note).parent.mkdir(parents=True, exist_ok=True)
        (root / note).write_text(text)


def removed_versions(done: Swept) -> set[str]:
    assert done.failed == ()
    return {os.path.relpath(one.url, done.plan.root) for one in done.removed}


@pytest.mark.few_cases(3)
@every_break
def test_broken_notes_end_no_sweep(text: str, tmp_path: Path) -> None:
    yard_with(tmp_path, NOTES, text)
    assert "web/versions/0001-abc" in removed_versions(swept(tmp_path))
    for corpus in ("other", "we{b}"):
        assert (tmp_path / corpus / "versions/0002-abc/version.json").exists()


@pytest.mark.slow
@every_break
@pytest.mark.parametrize("note", NOTES)
def test_a_broken_note_ends_no_sweep(note: str, text: str, tmp_path: Path) -> None:
    yard_with(tmp_path, [note], text)
    assert "web/versions/0001-abc" in removed_versions(swept(tmp_path))


def test_a_corpus_with_a_broken_version_is_left_alone(tmp_path: Path) -> None:
    yard_with(tmp_path, ["other/versions/0001-abc/version.json"], "[")
    assert "web/versions/0001-abc" in removed_versions(swept(tmp_path))
    assert (tmp_path / "other/versions/0001-abc/corpus_text_document.bin").exists()


def test_names_that_lead_out_of_the_yard_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("precious")
    work = tmp_path / "yard" / "begun.work"
    work.mkdir(parents=True)
    (work / "final-abc.json").write_text(json.dumps(["../outside", str(tmp_path / "outside"), "/"]))
    swept(tmp_path / "yard")
    assert (tmp_path / "outside").read_text() == "precious"


# --- all others -------------------------------------------------------------------------------

OWN = {  # between the steps of a run
    "stages/dedup/decide.py",
    "trainyard/collection/duplicates/clusters.py",
    "stages/mix/scatter.py",  # between the steps of a run
    "trainyard/collection/sources/html_reader.py",  # a string's length is bounded, of its process
    "trainyard/serving/openai_options.py",  # what it has just written
    "trainyard/checkpoint/scattered_load.py",  # between the ranks of a load
    "trainyard/serving/wire.py",  # between a server and its engine
    "stages/runtime/ranks.py",  # between a stage and its ranks
    "trainyard/conversion/torch_save/pickle_reader.py",  # its task, in the arguments of a process
    "trainyard/tokenizers/fast/gigatoken.py",  # what the library has written
    "trainyard/tokenizers/fast/seams.py",  # likewise
    "trainyard/testing/kill.py",
}
"""Readers of what this program itself wrote, and those that handle every exception."""


def test_nobody_reads_foreign_json_without_a_word_on_deep_ones() -> None:
    found = set()
    for folder in ("flows", "stages", "trainyard"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if re.search(r"(?<!orjson)\bjson\.loads?\(", text) and "RecursionError" not in text:
                found.add(str(path.relative_to(ROOT)))
    assert found == OWN


# --- shares -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["x/../../secret", "..\\secret", "", "a b", "a" * 1025, 7, None])
def test_the_file_of_a_share_is_an_id_and_no_path(file: Any, tmp_path: Path) -> None:
    account = tmp_path / "0.share.json"
    document = {"format_version": merge_shares.FORMAT_VERSION, "file": file, "etags": {}}
    account.write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="not the record of a share"):
        merge_shares._read_share(str(account))
    account.write_text(json.dumps(document | {"file": "0123456789ab"}))
    assert merge_shares._read_share(str(account)) == ("0123456789ab", {})


READ_BLOCKS: dict[str, dict[str, Any]] = {
    "no file": {"size_bytes": 1, "version": "1", "digests": {}, "url": "/nowhere"},
    "other blocks": {"digests": {"1": "a"}},
    "blocks below zero": {"digests": {"-1": "a"}},
    "blocks beyond": {"size_bytes": 2**62, "digests": {"0": "a"}},
    "a size below zero": {"size_bytes": -1, "digests": {}},
    "a size of digits": {"size_bytes": "9" * 5000, "digests": {}},
    "a number of digits": {"digests": {"9" * 5000: "a"}},
    "a number of letters": {"digests": {"a": "a"}},
    "lists of digests": {"digests": ["a"]},
    "no digests": {"digests": None},
    "a password": {"url": "https://me:hunter2@h/a", "digests": {"0": "a"}},
}
"""What the `.blocks.json` of a share may say of a file."""


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("kind", READ_BLOCKS)
def test_forged_blocks_of_a_share_are_no_digest(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    info = store.info(str(tmp_path / "a"))
    read = {"size_bytes": info.size_bytes, "version": info.version} | READ_BLOCKS[kind]
    url = read.pop("url", str(tmp_path / "a"))
    document = {"format_version": share_digests.FORMAT_VERSION, "files": {url: read}}
    (tmp_path / "b.json").write_text(json.dumps(document))
    before, words = raw_digest(str(tmp_path / "a")), ""
    try:
        ((found, blocks),) = share_digests._read_blocks(str(tmp_path / "b.json")).values()
        assert not remember_digest(url, found, blocks)
    except TrainyardError as error:
        words = str(error)
    assert "hunter2" not in words
    assert len(words) < 500
    assert raw_digest(str(tmp_path / "a")) == before
