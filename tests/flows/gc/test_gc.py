"""What a sweep removes and what it keeps, on a file system and in an object store."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from flows.gc.policy import DAY, Policy
from flows.gc.report import lines
from flows.gc.sweep import Swept, sweep
from stages.verify.run import compare, find_manifests
from tests.flows.gc.yards import (
    AT_ONCE,
    GONE,
    OTHERS,
    Corpus,
    begin_to_replace,
    claim,
    digest_of,
    make,
    make_older,
    step,
    train,
)
from trainyard.artifacts import store
from trainyard.artifacts.backends.s3 import S3Backend
from trainyard.artifacts.claim import acquire
from trainyard.artifacts.leftovers import uploads
from trainyard.artifacts.manifest import Manifest, PartRecord, publish, read_manifest
from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join
from trainyard.errors import ArtifactError, ClaimHeldError, ConfigError

pytestmark = pytest.mark.slow


def swept(root: str, policy: Policy = AT_ONCE, *, remove: bool = True) -> Swept:
    return sweep(root, [], policy, remove)


def kinds(found: Swept) -> dict[str, int]:
    counted: dict[str, int] = {}
    for one in found.plan.garbage:
        if one.kind != "scratch":  # of other runs on this machine
            counted[one.kind] = counted.get(one.kind, 0) + 1
    return counted


def verify(root: str) -> int:
    """Compare every file with its manifest; the number of manifests."""
    found = find_manifests(root)
    faults = [compare(base + record.path, record) for base, m in found for record in m.files]
    assert [fault for fault in faults if fault] == []
    assert len(found) == sum(name.endswith("manifest.json") for name in store.list_files(root))
    return len(found)


def test_after_a_sweep_what_is_kept_verifies_and_a_second_one_finds_nothing(store_url: str) -> None:
    corpus = Corpus(store_url)
    used, unused = corpus.publish("a"), corpus.publish("a", "b")
    current = corpus.publish("a", "c")
    train(join(store_url, "gpt", "checkpoint"), used)
    torn = Output.prefix(join(store_url, "gpt", "torn"))
    make(torn, {".bin": b"123"})
    begin_to_replace(torn)
    claim(join(store_url, "gpt", "out.claim.json"), GONE)
    store.write_bytes(join(store_url, "gpt", "out.work", "abc", "1.unit.json"), b"{}")
    before = set(store.list_files(store_url))
    first = swept(store_url, remove=False)
    assert set(store.list_files(store_url)) == before
    assert kinds(first) == {
        "corpus version": 1,
        "corpus part": 1,  # b's: a is in two versions that stay
        "abandoned output": 1,
        "stale claim": 1,
        "unfinished work": 1,
    }
    done = swept(store_url)
    assert (kinds(done), done.failed) == (kinds(first), ())
    gone = before - set(store.list_files(store_url))
    assert done.plan.size_bytes > 0
    assert all("0002-abc" in n or "/b0123" in n or "gpt/torn" in n or "out." in n for n in gone)
    assert read_manifest(f"{unused}.manifest.json") is None
    assert digest_of(used) != digest_of(current)
    assert verify(store_url) == 5  # two versions, two parts, a training
    assert kinds(swept(store_url)) == {}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_versions_stay_whoever_uses_them(tmp_path: Path, keep: int) -> None:
    corpus = Corpus(str(tmp_path))
    tokens = [corpus.publish(text) for text in "abc"]
    swept(str(tmp_path), Policy(keep_corpus_versions=keep, corpus_days=0))
    there = [read_manifest(f"{prefix}.manifest.json") is not None for prefix in tokens]
    assert there == [False] * (3 - keep) + [True] * keep
    assert verify(str(tmp_path)) == 2 * keep


def test_a_version_ages_from_the_time_of_the_next_one(tmp_path: Path) -> None:
    corpus = Corpus(str(tmp_path))
    corpus.publish("a")
    make_older(tmp_path, 30 * DAY)
    corpus.publish("b")
    policy = Policy(keep_corpus_versions=1, corpus_days=7)
    assert kinds(swept(str(tmp_path), policy)) == {}
    make_older(tmp_path, 8 * DAY)
    assert kinds(swept(str(tmp_path), policy)) == {"corpus version": 1, "corpus part": 1}


def test_a_version_is_known_by_what_it_holds_where_another_machine_named_it(tmp_path: Path) -> None:
    corpus = Corpus(str(tmp_path / "yard"))
    used, middle = corpus.publish("a"), corpus.publish("b")
    corpus.publish("c")
    elsewhere = Output.directory(str(tmp_path / "yard" / "gpt"))
    manifest = make(elsewhere, {"x": b"1"}, {"data_path": [used]})
    document = json.loads(store.read_bytes(elsewhere.manifest_url))
    document["inputs"]["data_path"]["urls"] = ["/mnt/somewhere/corpus_text_document"]
    store.write_bytes(elsewhere.manifest_url, json.dumps(document).encode())
    assert manifest.inputs["data_path"].digest == digest_of(used)
    done = swept(str(tmp_path / "yard"))
    assert done.plan.kept == {"web/versions/0001-abc": "gpt/"}
    assert read_manifest(f"{used}.manifest.json") is not None
    assert read_manifest(f"{middle}.manifest.json") is None
    assert verify(str(tmp_path / "yard")) == 5


def test_a_version_is_known_by_its_path_below_the_root(tmp_path: Path) -> None:
    corpus = Corpus(str(tmp_path))
    used = corpus.publish("a")
    corpus.publish("c")
    output = Output.directory(str(tmp_path / "gpt"))
    make(output, {"x": b"1"}, {"data_path": [used]})
    document = json.loads(store.read_bytes(output.manifest_url))
    url = "/in/the/container/web/versions/0001-abc/corpus_text_document"
    document["inputs"]["data_path"] = {"urls": [url, "/other"], "digest": "of both"}
    store.write_bytes(output.manifest_url, json.dumps(document).encode())
    assert "web/versions/0001-abc" in swept(str(tmp_path)).plan.kept


def test_an_unfinished_training_keeps_what_its_steps_were_trained_on(store_url: str) -> None:
    corpus = Corpus(store_url)
    used = corpus.publish("a")
    corpus.publish("b")
    step(join(store_url, "gpt", "checkpoint", "iter_0000100"), {"data_path": digest_of(used)})
    swept(store_url)
    assert read_manifest(f"{used}.manifest.json") is not None
    assert verify(store_url) == 5


def test_a_step_whose_config_was_changed_removes_nothing(tmp_path: Path) -> None:
    corpus = Corpus(str(tmp_path))
    used = corpus.publish("a")
    corpus.publish("b")
    folder = tmp_path / "gpt" / "checkpoint" / "iter_0000100"
    step(str(folder), {"data_path": digest_of(used)})
    (folder / "config.json").write_text('{"inputs": {}}')
    before = store.list_files(str(tmp_path))
    with pytest.raises(ArtifactError, match=r"config\.json: 14 bytes, manifest\.json says"):
        swept(str(tmp_path))
    assert store.list_files(str(tmp_path)) == before


def test_a_job_that_has_begun_keeps_what_its_options_name(tmp_path: Path) -> None:
    corpus = Corpus(str(tmp_path))
    used = corpus.publish("a")
    corpus.publish("b")
    run = tmp_path / "gpt" / ".runs" / "pretrain" / "20261121-101500-3f2a9c"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(f'data_path = ["0.5", "{used}"]\n')
    make_older(run, 2 * DAY)  # in a queue
    policy = Policy(keep_corpus_versions=1, corpus_days=0, run_days=0)
    found = sweep(str(tmp_path), [tmp_path / "gpt" / ".runs"], policy, remove=True)
    assert found.plan.kept["web/versions/0001-abc"] == f"run {run}"
    (run / "outcome.json").write_text("{}")
    assert kinds(sweep(str(tmp_path), [tmp_path / "gpt" / ".runs"], policy, remove=True)) == {
        "corpus version": 1,
        "corpus part": 1,
    }


def test_nothing_of_a_corpus_goes_while_a_flow_works_on_it(store_url: str) -> None:
    corpus = Corpus(store_url)
    old = corpus.publish("a")
    corpus.publish("b")
    held = acquire(join(store_url, "web", ".flow.claim.json"), 0)
    try:
        found = swept(store_url)
    finally:
        held.release()
    assert found.failed == ()
    assert [garbage.kind for garbage, _ in found.left] == ["corpus version", "corpus part"]
    assert sum("left for the next sweep: " in line for line in lines(found, False)) == 2
    assert [one["kind"] for one in found.to_document()["left"]] == ["corpus version", "corpus part"]
    assert read_manifest(f"{old}.manifest.json") is not None
    assert kinds(swept(store_url)) == {"corpus version": 1, "corpus part": 1}


@pytest.mark.slow
def test_a_sweep_may_be_killed_before_every_change(store_url: str) -> None:
    # Every change on files; one in four where each costs requests.
    step = 4 if store_url.startswith("s3://") else 1
    died = list(
        itertools.takewhile(
            lambda n: dies_of_sweeping(join(store_url, str(n)), n), range(1, 100, step)
        )
    )
    assert len(died) > 15 // step


def dies_of_sweeping(root: str, fatal: int) -> bool:
    """Sweep a fresh yard, killed before its n-th change; True when that came. Then sweep on."""
    corpus = Corpus(root)
    corpus.publish("a")
    corpus.publish("b")
    child = os.fork()
    if not child:
        changes = itertools.count(1)

        def kill(operation: str, url: str) -> None:
            if operation in ("delete", "replace", "create") and next(changes) == fatal:
                os._exit(9)

        store.observers[:] = [kill]
        try:
            swept(root)
        finally:
            os._exit(0)
    died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert kinds(swept(root)) or not died
    assert kinds(swept(root)) == {}
    assert verify(root) == 2
    assert not [n for n in store.list_files(root) if "0001-abc" in n or "/a0123" in n]
    return died


# --- what killed runs leave ---------------------------------------------------------------------


def test_a_claim_that_is_renewed_stays_with_all_that_it_covers(store_url: str) -> None:
    claim(join(store_url, "out.claim.json"), OTHERS)
    store.write_bytes(join(store_url, "out.work", "1.unit.json"), b"{}")
    claim(join(store_url, "folder", ".claim.json"), OTHERS)
    store.write_bytes(join(store_url, "folder", ".work", "1.unit.json"), b"{}")
    assert kinds(swept(store_url)) == {}
    anybody = Policy(claim_hours=0, attempt_days=0)
    assert kinds(swept(store_url, anybody)) == {"stale claim": 2, "unfinished work": 2}
    assert store.list_files(store_url) == {}


def test_a_claim_renewed_in_a_sweep_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "out.claim.json")
    claim(url, GONE)

    def renew(operation: str, renewed: str) -> None:
        if operation == "replace" and renewed == url:
            Path(url).write_bytes(OTHERS.encode(1))

    monkeypatch.setattr(store, "observers", [renew])
    done = swept(str(tmp_path))
    assert done.failed == ()
    assert "its holder is alive" in str(done.left[0][1])
    assert json.loads(Path(url).read_text())["beat"] == 1


def test_final_files_that_a_killed_run_began_go_with_its_work(store_url: str) -> None:
    output = Output.directory(join(store_url, "begun"))
    for name in ("a.bin", "b.bin"):
        store.write_bytes(output.file_url(name), b"123")
    store.write_bytes(join(output.work_url, "final-abc.json"), b'["a.bin"]')
    done = swept(store_url)
    assert kinds(done) == {"unfinished work": 1}
    assert list(store.list_files(store_url)) == ["begun/b.bin"]  # nobody noted that one


def test_an_output_that_was_finished_meanwhile_stays(store_url: str) -> None:
    output = Output.directory(join(store_url, "begun"))
    store.write_bytes(join(output.work_url, "final-abc.json"), b'["a.bin"]')
    store.write_bytes(output.file_url("a.bin"), b"1")
    (found,) = [one for one in swept(store_url, remove=False).plan.garbage if "begun" in one.url]
    make(output, {"a.bin": b"123"})
    with pytest.raises(ClaimHeldError, match="published in the meantime"):
        found.remove()
    assert verify(store_url) == 1
    assert not store.exists(output.claim_url)


def test_work_beside_a_whole_artifact_goes_and_the_artifact_stays(store_url: str) -> None:
    output = Output.directory(join(store_url, "whole"))
    make(output, {"a.bin": b"123"})
    store.write_bytes(join(output.work_url, "final-abc.json"), b'["a.bin"]')
    swept(store_url)
    assert verify(store_url) == 1
    assert sorted(store.list_files(store_url)) == ["whole/a.bin", "whole/manifest.json"]


def test_a_step_without_a_manifest_goes_beside_ours_and_stays_among_others(store_url: str) -> None:
    step(join(store_url, "ours", "iter_0000100"), {})
    store.write_bytes(join(store_url, "ours", "iter_0000200", "model.safetensors"), b"1")
    store.write_bytes(join(store_url, "theirs", "iter_0000200", "mp_rank_00", "model.pt"), b"1")
    assert kinds(swept(store_url)) == {"abandoned output": 1}
    left = set(store.list_files(store_url))
    assert "ours/iter_0000200/model.safetensors" not in left
    assert "theirs/iter_0000200/mp_rank_00/model.pt" in left
    assert verify(store_url) == 1


def test_files_that_no_run_made_are_nobodys_garbage(store_url: str) -> None:
    for name in ("books/a.jsonl", "notes.txt", "web/current.json", "x/manifest.json"):
        store.write_bytes(join(store_url, name), b'{"not": "ours"}')
    before = store.list_files(store_url)
    assert kinds(swept(store_url)) == {}
    assert store.list_files(store_url) == before


def test_an_upload_that_nobody_completes_is_aborted(s3_url: str) -> None:
    backend = S3Backend("s3")
    for name in ("lost.bin", "out.bin"):
        place = backend.address(join(s3_url, name))
        upload = backend.call("create_multipart_upload", **place)["UploadId"]
        backend.call("upload_part", **place, UploadId=upload, PartNumber=1, Body=b"12345")
    claim(join(s3_url, "out.claim.json"), OTHERS)
    done = swept(s3_url)
    assert kinds(done) == {"unfinished upload": 1}
    assert done.plan.size_bytes >= 5
    assert [left.url for left in uploads(s3_url)] == [join(s3_url, "out.bin")]
    assert kinds(swept(s3_url)) == {}


def test_an_upload_of_shares_waits_for_the_join(s3_url: str) -> None:
    backend = S3Backend("s3")
    backend.call("create_multipart_upload", **backend.address(join(s3_url, "out.bin")))
    work = join(s3_url, "out.shares", "00000-of-00002.claim.json")
    claim(work, OTHERS)
    assert kinds(swept(s3_url)) == {}  # a share is at work
    store.delete(work)
    store.write_bytes(join(s3_url, "out.shares", "key.json"), b"{}")
    patient = Policy(upload_hours=0, attempt_days=1e5)  # moto's uploads all began in 2010
    assert kinds(swept(s3_url, patient)) == {}
    assert kinds(swept(s3_url)) == {"unfinished upload": 1}
    assert uploads(s3_url) == []


def test_an_empty_root_of_a_store_is_refused(s3_url: str) -> None:
    with pytest.raises(ConfigError, match="nothing is there"):
        sweep(join(s3_url, "yrad"), [], AT_ONCE, remove=True, is_named=True)
    store.write_bytes(join(s3_url, "yard", "a"), b"1")
    assert kinds(sweep(join(s3_url, "yard"), [], AT_ONCE, remove=True, is_named=True)) == {}


# --- words --------------------------------------------------------------------------------------


def test_a_dry_run_reports_names_sizes_and_reasons(tmp_path: Path) -> None:
    claim(str(tmp_path / "out.claim.json"), GONE)
    report = [
        line for line in lines(swept(str(tmp_path), remove=False), True) if "scratch" not in line
    ]
    assert report[0].startswith(f"stale claim: {tmp_path}/out.claim.json, ")
    assert "not renewed for" in report[0]
    assert report[-1].endswith("would be removed")


@pytest.mark.parametrize("wrong", [{"keep_corpus_versions": 0}, {"run_days": -1.0}])
def test_an_impossible_policy_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(wrong)).replace("_", "-")):
        Policy(**wrong)  # type: ignore[arg-type]


def test_a_run_that_was_begun_to_be_replaced_goes_with_its_steps(store_url: str) -> None:
    run, parts = join(store_url, "gpt", "run"), []
    for name in ("iter_0000001", "iter_0000002"):
        step(join(run, name), {})
        found = read_manifest(join(run, name, "manifest.json"))
        assert found is not None
        parts.append(PartRecord.of(name, found[0]))
    output = Output.directory(run)
    publish(output.manifest_url, Manifest(stage="pretrain", parts=tuple(parts)), None)
    assert kinds(swept(store_url)) == {}
    begin_to_replace(output)
    assert kinds(swept(store_url)) == {"abandoned output": 1}
    assert store.list_files(run) == {}
