"""The certify stage proves real runs that were stopped, and names what was changed in them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.certify.config import CertifyConfig
from stages.certify.run import certify
from stages.runtime.context import StageRun
from tests.stages.directly import Done, run_program
from tests.stages.pretrain_runs import Pretrain, manifest
from tests.stages.test_report import report
from tests.trainyard.datasets.test_gpt import write_pair
from trainyard.artifacts.digest import digest_bytes
from trainyard.artifacts.manifest import PartRecord
from trainyard.config import from_dict
from trainyard.errors import ArtifactError, ConfigError, DataError
from trainyard.training.certify.certificate import CHECKS, Certificate, Link

pytestmark = pytest.mark.slow

STOPPED = 143


@pytest.fixture(scope="module")
def whole(pretrain: Pretrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped once and is finished: checkpoints 3, 6 and 8."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    pretrain(folder, eval_at_start=True, exit_interval=5, expect=STOPPED)
    shutil.copytree(folder, folder.with_name("stopped"))
    pretrain(folder, eval_at_start=True)
    return folder


@pytest.fixture(scope="module")
def stopped(whole: Path) -> Path:
    """The same when it was stopped: checkpoints 3, and 5 to go on from."""
    return whole.with_name("stopped")


def found_in(folder: Path, **options: Any) -> Certificate:
    config = from_dict(CertifyConfig, {"run": str(folder), **options})
    return certify(config, StageRun("certify", {}, None))


def link_in(folder: Path, **options: Any) -> Link:
    link = found_in(folder, **options).first_broken_link
    assert link is not None
    return link


def command(*words: object, expect: int | None = None) -> Done:
    return run_program("stages.certify", *map(str, words), expect=expect)


# --- sound runs ---------------------------------------------------------------------------------


def test_a_finished_run_is_proven_completely(whole: Path, tmp_path: Path) -> None:
    written = tmp_path / "certificate.json"
    done = command(whole, "--check-digests", "--complete", "--output", written, expect=0)
    assert "proven: steps 1 to 8 follow each other, up to 32 samples, none lost" in done.out
    assert "1 data-parallel rank, micro-batches of 2: steps 1 to 8" in done.out
    document = json.loads(written.read_text())
    assert (document["verdict"], document["complete"]) == ("proven", True)
    counts = {check["name"]: check["checked"] for check in document["checks"]}
    assert list(counts) == list(CHECKS)
    assert counts["samples"] == counts["rng"] == counts["rates"] == 8
    assert document["published_steps"] == [3, 6, 8]
    assert str(whole.parent) not in written.read_text(), "equal runs, equal certificates"
    again = command(whole, "--json", "--check-digests")
    assert json.loads(again.out) == document


def test_an_unfinished_run_needs_data_path(stopped: Path, tokens: str) -> None:
    found = found_in(stopped)
    assert found.is_proven, found.sentence
    (reason,) = (check.reason for check in found.checks if check.reason)
    assert reason == "data not available; give --data-path"
    assert (found.finished, found.last_step, found.of_steps) == (False, 5, 8)
    assert found_in(stopped, data_path=[tokens]).is_complete
    done = command(stopped, "--complete", expect=1)
    assert "--complete: not checked: samples (data not available" in done.err


def test_growing_cyclic_batches_are_proven(pretrain: Pretrain, tokens: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    grow = {"train_iters": None, "train_samples": 70, "rampup_batch_size": [2, 2, 12]}
    grow |= {"global_batch_size": 8, "dataloader_type": "cyclic"}
    pretrain(folder, **grow, exit_interval=4, expect=STOPPED)
    assert found_in(folder, data_path=[tokens]).is_complete
    pretrain(folder, **grow)
    found = found_in(folder)
    assert found.is_complete, found.sentence
    assert found_in(folder, check_every=3).is_proven


def test_the_proof_includes_the_run_that_was_loaded(
    pretrain: Pretrain, whole: Path, tmp_path: Path
) -> None:
    folder, before = tmp_path / "on", tmp_path / "before"
    shutil.copytree(whole, before)
    pretrain(folder, load=str(before / "iter_0000003"), lr_decay_iters=8)
    found = found_in(folder)
    assert found.is_complete, found.sentence
    assert (found.first_step, found.last_step) == (4, 8)
    assert found.begins_at == "step 3 of another run"
    shutil.move(before, tmp_path / "moved")
    found = found_in(folder)
    assert found.is_proven
    assert not found.is_complete
    assert "give its path with --load" in command(folder).out
    assert found_in(folder, load=str(tmp_path / "moved")).is_complete
    state = tmp_path / "moved/iter_0000003/state.json"
    state.write_text(state.read_text().replace('"ledger_digest": "', '"ledger_digest": "0'))
    assert not found_in(folder, load=str(tmp_path / "moved")).is_complete  # not the one it was
    (tmp_path / "tune").mkdir()
    tune = {"load": str(whole), "finetune": True, "train_iters": 2, "eval_iters": 0, "lr": 1e-4}
    pretrain(tmp_path / "tune", **tune)
    found = found_in(tmp_path / "tune")
    assert found.is_complete, found.sentence
    assert found.begins_at == "weights of another run (--finetune)"


def test_retained_and_recent_steps_agree(pretrain: Pretrain, tokens: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keep = {"save_interval": 1, "save_retain_interval": 4, "save_keep_last": 3}
    pretrain(folder, **keep, exit_interval=7, expect=STOPPED)
    found = found_in(folder, data_path=[tokens], check_digests=True)
    assert found.is_complete, found.sentence
    assert found.last_step == 7
    assert len(found.published_steps) > 2
    path = folder / "iter_0000006/manifest.json"
    text = path.read_text()
    path.write_text(text[:99])
    found = found_in(folder)  # step 7 has the same lines; the file still differs
    assert found.first_broken_link is not None
    assert found.first_broken_link[:2] == (6, "files")
    assert [check.name for check in found.checks if check.broken] == ["files"]
    path.write_text(text)
    shutil.rmtree(folder / "iter_0000004")
    assert link_in(folder)[:4] == (1, "steps", "step 1", "step 5")


def test_steps_of_other_runs_are_remarks(stopped: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    shutil.copytree(whole / "iter_0000003", folder / "superseded/11ae22bf/iter_0000003")
    shutil.copytree(whole / "iter_0000003", folder / "iter_0000002")
    document = json.loads((folder / "iter_0000002/manifest.json").read_text())
    document["lineage"] = "other"
    (folder / "iter_0000002/manifest.json").write_text(json.dumps(document))
    shutil.copytree(whole / "iter_0000006", folder / "iter_0000006")
    (folder / "iter_0000006/manifest.json").unlink()
    found = found_in(folder)
    assert found.is_proven, found.sentence
    assert found.published_steps == (3, 5)
    assert found.remarks == (
        "iter_0000002: of another run, with other options or data",
        "iter_0000006: no manifest.json, so the save did not finish",
        "superseded/ holds 1 step of other runs, set aside",
    )


# --- runs that were tampered with ---------------------------------------------------------------


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """The finished run, to be damaged."""
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def rewrite(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file and every manifest that lists it, as somebody would who knows how."""
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    for place in dict.fromkeys((path.parent, folder)):
        found = manifest(place)
        listed = (place / file.path for file in found.files)
        records = zip(found.files, (file.read_bytes() for file in listed), strict=True)
        files = (replace(f, size_bytes=len(d), digest=digest_bytes(d)) for f, d in records)
        parts = (PartRecord.of(part.path, manifest(place / part.path)) for part in found.parts)
        now = replace(found, files=tuple(files), parts=tuple(parts))
        (place / "manifest.json").write_text(json.dumps(now.to_document()))


def edit_line(number: int, **fields: Any) -> Callable[[bytes], bytes]:
    """Another value in a line of a ledger."""

    def change(data: bytes) -> bytes:
        lines = data.decode().splitlines()
        lines[number] = json.dumps({**json.loads(lines[number]), **fields})
        return "".join(f"{line}\n" for line in lines).encode()

    return change


def drop_line(number: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        lines = data.decode().splitlines()
        del lines[number]
        return "".join(f"{line}\n" for line in lines).encode()

    return change


@pytest.mark.parametrize(
    ("name", "change", "step", "check"),
    [
        ("iter_0000006/ledger.jsonl", edit_line(1, samples="00"), 5, "samples"),
        ("iter_0000006/ledger.jsonl", edit_line(1, rng="00"), 5, "rng"),
        ("iter_0000006/ledger.jsonl", edit_line(1, learning_rate=1.0), 5, "rates"),
        ("iter_0000006/ledger.jsonl", edit_line(1, lm_loss=1.0), 6, "ledger"),
        ("iter_0000006/ledger.jsonl", edit_line(1, tokens=1), 5, "position"),
        ("iter_0000006/ledger.jsonl", drop_line(1), 5, "steps"),
        ("iter_0000006/ledger.jsonl", drop_line(2), 6, "steps"),
        ("ledger.jsonl", drop_line(8), 8, "ledger"),
        ("iter_0000006/state.json", lambda d: d.replace(b'"seed": 1234', b'"seed": 1'), 6, "state"),
    ],
)
def test_a_change_is_the_first_broken_link(
    copied: Path, name: str, change: Callable[[bytes], bytes], step: int, check: str
) -> None:
    rewrite(copied, name, change)
    link = link_in(copied, check_digests=True)
    assert (link.step, link.check) == (step, check)
    done = command(copied, expect=1)
    assert f"the first broken link: step {step}, {check} (" in done.err
    assert "Traceback" not in done.err


def test_a_certificate_of_a_broken_run_is_written_too(copied: Path, tmp_path: Path) -> None:
    rewrite(copied, "iter_0000008/ledger.jsonl", edit_line(0, samples="00"))
    done = command(copied, "--json", "--output", tmp_path / "c.json", expect=1)
    document = json.loads((tmp_path / "c.json").read_text())
    assert document == json.loads(done.out)
    assert document["verdict"] == "broken"
    link = document["first_broken_link"]
    assert (link["step"], link["check"], link["found"]) == (7, "samples", "00")


# --- data ---------------------------------------------------------------------------------------


def test_missing_or_other_data_is_reported(whole: Path, tokens: str, tmp_path: Path) -> None:
    other = write_pair(tmp_path / "t", [60] * 40, 7)
    with pytest.raises(DataError, match="not the token files of the run of"):
        found_in(whole, data_path=[other])
    again = shutil.copytree(Path(tokens).parent, tmp_path / "moved")
    assert found_in(whole, data_path=[str(again / "t")]).is_complete
    shorter = write_pair(tmp_path / "s", [30] * 80)
    link = link_in(whole, data_path=[shorter], check_data=False)
    assert link.check == "samples"


def test_changed_data_is_unavailable(pretrain: Pretrain, whole: Path, tmp_path: Path) -> None:
    tokens = write_pair(tmp_path / "t", [60] * 40)
    folder = tmp_path / "run"
    pretrain(folder, data_path=tokens, train_iters=2, eval_iters=0)
    assert found_in(folder).is_complete
    write_pair(tmp_path / "t", [60] * 41)
    os.utime(f"{tokens}.bin", (1e9, 1e9))
    reasons = {check.name: check.reason for check in found_in(folder).checks}
    assert reasons["samples"].startswith("data has changed: ")
    Path(f"{tokens}.idx").unlink()
    reasons = {check.name: check.reason for check in found_in(folder).checks}
    assert "does not exist; give its present path with --data-path" in reasons["samples"]


def test_data_provided_by_a_program_is_unavailable(copied: Path) -> None:
    def provided(data: bytes) -> bytes:
        provided = {"provided": {"dataset_provider": "my.samples"}}
        return json.dumps({**json.loads(data), **provided}).encode()

    def external(data: bytes) -> bytes:
        document = json.loads(data)
        document["provided"] = {}
        document["run"]["dataloader_type"] = "external"
        return json.dumps(document).encode()

    for change, words in ((provided, "my.samples"), (external, "only its loader knows")):
        rewrite(copied, "iter_0000008/config.json", change)
        found = found_in(copied)
        assert found.is_proven
        assert [words in check.reason for check in found.checks if check.reason] == [True]


# --- refusals -----------------------------------------------------------------------------------


def test_a_folder_without_a_run_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the folder of the run, above it"):
        found_in(whole / "iter_0000003")
    with pytest.raises(ArtifactError, match="no checkpoint there"):
        found_in(tmp_path)
    shutil.copytree(whole / "iter_0000003", tmp_path / "run/iter_0000003")
    (tmp_path / "run/iter_0000003/ledger.jsonl").unlink()
    assert "there is no such file" in link_in(tmp_path / "run").found
    step = tmp_path / "made/iter_0000003"
    shutil.copytree(whole / "iter_0000003", step)
    rewrite(step, "state.json", lambda _: b'{"format_version": 1, "step": 3}')
    with pytest.raises(ArtifactError, match="has nothing to certify"):
        found_in(tmp_path / "made")
    for options, words in (
        ({"check_every": 0}, "--check-every"),
        ({"data_path": ["a"], "train_data_path": ["b"]}, "give the one that the run used"),
    ):
        with pytest.raises(ConfigError, match=words):
            from_dict(CertifyConfig, {"run": str(whole), **options})


# --- on the run card ----------------------------------------------------------------------------


def test_the_run_card_shows_the_certificate(whole: Path, tmp_path: Path) -> None:
    written = str(tmp_path / "certificate.json")
    command(whole, "--output", written, expect=0)
    page, summary = report(tmp_path, checkpoint=str(whole), certificate=written)
    section = page.sections["What is certified"]
    assert "Proven: steps 1 to 8 follow each other" in section.text
    assert section.rows[0] == ["what", "checked", "result"]
    assert section.facts["samples"] == str(summary["certificate"]["train_samples"])
    assert CHECKS["samples"] in [row[0] for row in section.rows]
    assert summary["certificate"]["verdict"] == "proven"
    plain, summary = report(tmp_path, checkpoint=str(whole))
    assert "What is certified" not in plain.sections
    assert "certificate" not in summary


def test_run_card_shows_a_broken_link(copied: Path, whole: Path, tmp_path: Path) -> None:
    rewrite(copied, "iter_0000006/ledger.jsonl", edit_line(1, samples="<b>00"))
    written = tmp_path / "certificate.json"
    command(copied, "--output", written, expect=1)
    page, summary = report(tmp_path, checkpoint=str(copied), certificate=str(written))
    text = page.sections["What is certified"].text
    assert "Broken at step 5, samples: expected " in text
    assert "<b>00" in text
    assert summary["certificate"]["first_broken_link"]["step"] == 5
    document = json.loads(written.read_text())
    written.write_text(json.dumps({**document, "lineage": "11ae"}))
    with pytest.raises(ConfigError, match=r"--certificate .*belongs to another run"):
        report(tmp_path, checkpoint=str(copied), certificate=str(written))
    written.write_text("[]")
    with pytest.raises(ArtifactError, match="not a certificate"):
        report(tmp_path, checkpoint=str(copied), certificate=str(written))
