"""The contract that every stage keeps, shown on a toy."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from stages.runtime.context import StageRun
from tests.stages.directly import run_program, until
from tests.stages.toy import ToyConfig
from trainyard.artifacts import claim, store
from trainyard.artifacts.manifest import FORCE, Manifest, read_manifest
from trainyard.artifacts.output import Output
from trainyard.config import from_dict
from trainyard.config_text import parse_document
from trainyard.errors import ClaimHeldError

TEXT = "one\ntwo\nthree\n"


class Toy:
    """The toy stage as a command, and what it left. Called, it runs in this process; what is about
    processes asks for one."""

    def __init__(self, root: str, tmp_path: Path) -> None:
        self.input = store.join(root, "in.txt")
        self.output = store.join(root, "out")
        self.run_dir = tmp_path / "run"
        self.runs = 0
        store.write_bytes(self.input, TEXT.encode())

    def command(self, *arguments: str) -> list[str]:
        base = [sys.executable, "-m", "tests.stages.toy"]
        return [*base, "--input", self.input, "--output-dir", self.output, *arguments]

    def environment(self) -> dict[str, str]:
        self.runs += 1
        return {**os.environ, "TRAINYARD_RUN_DIR": str(self.run_dir / str(self.runs))}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, expect: int = 0) -> str:
        with mock.patch.dict(os.environ, self.environment()):
            done = run_program(*self.command(*arguments)[2:])
        assert done.status == expect, done.err
        return done.out + done.err

    def process(self, *arguments: str, expect: int = 0) -> str:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=60)
        assert process.returncode == expect, err
        return out + err

    def left(self, name: str) -> dict[str, object]:
        document: dict[str, object] = json.loads((self.run_dir / str(self.runs) / name).read_text())
        return document

    def has_finished_a_unit(self) -> bool:
        return any(Path(self.output, ".work").glob("*/0.unit.json"))

    def manifest(self) -> Manifest:
        found = read_manifest(store.join(self.output, "manifest.json"))
        assert found is not None
        return found[0]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(str(tmp_path), tmp_path)


def test_a_run_publishes_and_a_second_one_has_nothing_to_do(store_url: str, tmp_path: Path) -> None:
    toy = Toy(store_url, tmp_path)
    assert "there is no manifest yet" in toy.process()
    assert store.read_bytes(store.join(toy.output, "upper.txt")) == TEXT.upper().encode()
    assert toy.left("outcome.json")["outcome"] == "ran"
    assert "nothing to do" in toy()
    assert toy.left("outcome.json")["outcome"] == "noop"
    assert set(store.list_files(toy.output)) == {"upper.txt", "timing.json", "manifest.json"}


def test_a_document_of_several_runs_has_one_outcome(toy: Toy, tmp_path: Path) -> None:
    outputs = [str(tmp_path / name) for name in "abc"]
    document = tmp_path / "runs.toml"
    runs = "".join(f'[[runs]]\noutput_dir = "{output}"\n' for output in outputs)
    document.write_text(f'suffix = "!"\n{runs}suffix = "?"\n')

    def run() -> dict[str, Any]:
        with mock.patch.dict(os.environ, toy.environment()):
            line = ["tests.stages.toy", "--input", toy.input, "--config", str(document)]
            done = run_program(*line)
        assert done.status == 0, done.err
        return toy.left("outcome.json")

    assert run()["reason"] == "3 of 3 had work: there is no manifest yet"
    ends = [Path(output, "upper.txt").read_text()[-2:] for output in outputs]
    assert ends == ["!\n", "!\n", "?\n"]
    Path(outputs[1], "upper.txt").unlink()
    found = run()
    assert [one["outcome"] for one in found["runs"]] == ["noop", "ran", "noop"]
    assert found["reason"] == "1 of 3 had work: output file upper.txt is gone"
    assert found["runs"][2]["manifest_url"] == f"{outputs[2]}/manifest.json"
    assert run()["outcome"] == "noop"


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ("runs = 3", "'runs' must be a list of tables, one for each run"),
        ("runs = []", "'runs' must be a list of tables, one for each run"),
        ("[[runs]]\n[[runs]]", r"two runs write to .*out; give each an output"),
        ("[[runs]]\nsufix = '!'", "run 0: .*sufix"),
    ],
)
def test_a_wrong_document_of_runs_is_refused(toy: Toy, tmp_path: Path, runs: str, why: str) -> None:
    document = tmp_path / "runs.toml"
    document.write_text(runs)
    assert re.search(why, toy("--config", str(document), expect=2))
    assert not Path(toy.output).exists()


def test_the_reason_of_a_rerun_names_what_changed(toy: Toy) -> None:
    toy()
    assert "option --suffix changed ('' -> '!')" in toy("--suffix", "!")
    store.write_bytes(toy.input, b"changed\n")
    assert "the input changed" in toy("--suffix", "!")
    assert "--force was given" in toy("--suffix", "!", "--force")
    Path(toy.output, "upper.txt").unlink()
    assert "output file upper.txt is gone" in toy("--suffix", "!")
    assert "nothing to do" in toy("--suffix", "!", "--seconds", "0.001")


def test_an_option_that_an_earlier_version_did_not_have_changes_nothing(toy: Toy) -> None:
    toy()
    path = Path(toy.output, "manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["config"]["suffix"]
    path.write_text(json.dumps(manifest))
    assert "nothing to do" in toy()
    assert "option --suffix changed (None -> '!')" in toy("--suffix", "!")


def test_a_flow_run_forces_a_stage_once(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    toy()
    for flow_run in ("one", "another"):
        monkeypatch.setenv(FORCE, flow_run)
        assert "running because the flow run forces it" in toy()
        assert "nothing to do" in toy(), "a job that is requeued after its end is forced again"
    monkeypatch.delenv(FORCE)
    assert "nothing to do" in toy()


def test_a_change_of_the_code_is_a_reason(toy: Toy) -> None:
    toy()
    url = store.join(toy.output, "manifest.json")
    document = store.read_json(url)
    document["code"]["digest"] = "0" * 64
    store.write_bytes(url, json.dumps(document).encode())
    assert "the code changed (00000000 ->" in toy()


def test_the_output_digest_sees_contents_only(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "b"):
        toy = Toy(str(tmp_path / name), tmp_path / name)
        toy()
        digests.add(toy.manifest().output_digest)
    assert len(digests) == 1


def test_dry_run_prints_a_document_that_config_reads_back(toy: Toy, tmp_path: Path) -> None:
    text = toy("--suffix", "?", "--dry-run")
    document = parse_document(text, ".toml", "dry run")
    assert from_dict(ToyConfig, document).suffix == "?"
    assert not Path(toy.output).exists()
    path = tmp_path / "toy.toml"
    path.write_text(text)
    run_program("tests.stages.toy", "--config", str(path), "--suffix", "!", expect=0)
    assert store.read_bytes(store.join(toy.output, "upper.txt")).startswith(b"ONE!")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--sufix", "x"), 2, "--sufix"),
        (("--suffix", "no"), 2, "--suffix cannot be 'no'"),
        (("--seconds", "soon"), 2, "soon"),
        (("--config", "/nowhere.toml"), 2, "/nowhere.toml"),
        (("--input", "/nowhere.txt"), 1, "/nowhere.txt"),
        (("--fail", "data"), 1, "line 1 is bad"),
        (("--fail", "defect"), 70, "defect of trainyard: ZeroDivisionError"),
    ],
)
def test_a_refusal_has_its_exit_status_and_message_and_no_output(
    toy: Toy, arguments: tuple[str, ...], status: int, words: str
) -> None:
    text = toy(*arguments, expect=status)
    assert words in text
    assert "Traceback" not in text
    assert not store.exists(store.join(toy.output, "manifest.json"))
    assert not store.exists(store.join(toy.output, ".claim.json"))


def test_a_failure_writes_failure_json_for_the_caller(toy: Toy) -> None:
    toy.process("--fail", "data", expect=1)
    left = toy.left("failure.json")
    assert (left["class"], left["exit_status"], left["stage"]) == ("DataError", 1, "toy")


@pytest.mark.slow
def test_debug_shows_the_traceback(toy: Toy) -> None:
    assert "Traceback" in toy.process("--fail", "defect", "--debug", expect=70)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_stops_and_keeps_units(toy: Toy, number: signal.Signals, status: int) -> None:
    process = toy.start("--gate", "/never")
    until(toy.has_finished_a_unit)
    sent = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=10) == status
    assert time.monotonic() - sent < 5
    assert not store.exists(store.join(toy.output, "manifest.json"))
    assert not store.exists(store.join(toy.output, ".claim.json"))
    toy()
    done_before = toy.manifest().metrics["done_before"]
    assert done_before >= 1


@pytest.mark.slow
def test_a_second_run_waits_for_the_first_and_is_a_noop(toy: Toy, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = toy.start("--gate", str(gate))
    until(toy.has_finished_a_unit)
    assert "another run is writing" in toy("--claim-wait-seconds", "0", expect=3)
    second = toy.start("--claim-wait-seconds", "60")
    assert second.stderr is not None
    while "waiting for" not in second.stderr.readline():
        pass
    gate.touch()
    assert "another run finished this output in the meantime" in second.communicate(timeout=60)[1]
    assert first.wait(timeout=60) == 0
    first.communicate()


def test_a_stage_stops_when_its_starter_dies(toy: Toy) -> None:
    script = (
        "import os, subprocess, sys, time\n"
        "r, w = os.pipe()\n"
        "env = {**os.environ, 'TRAINYARD_LIFELINE_FD': str(r)}\n"
        "p = subprocess.Popen(sys.argv[1:], env=env, pass_fds=(r,), start_new_session=True)\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, *toy.command("--gate", "/never")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        until(toy.has_finished_a_unit)
        starter.kill()
    until(lambda: not _alive(child))
    assert not Path(toy.output, ".claim.json").exists()


def test_another_stages_artifact_is_never_replaced(toy: Toy) -> None:
    toy()
    url = store.join(toy.output, "manifest.json")
    document = store.read_json(url) | {"stage": "pretrain"}
    store.write_bytes(url, json.dumps(document).encode())
    for force in ([], ["--force"]):
        text = toy("--suffix", "!", *force, expect=2)
        assert "this is an artifact of pretrain, which toy would replace" in text
    assert store.exists(store.join(toy.output, "upper.txt"))


@pytest.mark.parametrize("nested", ["same", "around", "inside"])
def test_an_output_over_an_input_is_refused(tmp_path: Path, nested: str) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "in.txt").write_text(TEXT)
    source = {"same": folder, "around": folder / "in.txt", "inside": folder}[nested]
    output = {"same": folder, "around": folder, "inside": folder / "out"}[nested]
    (tmp_path / "link").symlink_to(output.parent)
    into = str(tmp_path / "link" / output.name)
    done = run_program("tests.stages.toy", "--input", str(source), "--output-dir", into, expect=2)
    assert "choose another place for the output" in done.err
    assert [path.name for path in folder.iterdir()] == ["in.txt"]


def test_an_output_that_is_a_file_is_refused(toy: Toy) -> None:
    store.write_bytes(toy.output, b"a file")
    assert "this is a file" in toy(expect=2)
    toy.output = store.join(toy.output, "below")
    assert "a file stands where a folder is needed" in toy(expect=2)


def test_invalid_numbers_are_refused(toy: Toy) -> None:
    assert "--seconds must be a finite number, got nan" in toy("--seconds", "nan", expect=2)


def test_units_of_other_code_are_not_reused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    run = StageRun("toy", {}, Output.directory(toy.output), lineage="a", code="one")
    run.work.publish("0", {})
    for code, found in (("one", {}), ("two", None)):
        again = StageRun("toy", {}, Output.directory(toy.output), lineage="a", code=code)
        assert again.work.published("0") == found


def test_a_run_that_lost_its_claim_stops_writing(toy: Toy) -> None:
    output = Output.directory(toy.output)
    run = StageRun("toy", {}, output, claim=claim.acquire(output.claim_url, 0))
    assert run.claim is not None
    run.claim.lost = True
    with pytest.raises(ClaimHeldError, match="took this output over"):
        run.write_text("upper.txt", "late")
    run.defer_signals()
    with pytest.raises(ClaimHeldError):
        run.on_signal(signal.SIGTERM, None)
    run.claim.release()


def test_files_of_an_earlier_version_are_removed_and_other_files_stay(toy: Toy) -> None:
    toy()
    url = store.join(toy.output, "manifest.json")
    document = store.read_json(url)
    old = store.write_bytes(store.join(toy.output, "old.txt"), b"old")
    record = {"path": "old.txt", "size_bytes": 3, "digest": old.digest, "volatile": True}
    document["files"].append(record)
    store.write_bytes(url, json.dumps(document).encode())
    store.write_bytes(store.join(toy.output, "notes-of-a-person.txt"), b"keep")
    toy("--suffix", "!")
    names = set(store.list_files(toy.output))
    assert names == {"upper.txt", "timing.json", "manifest.json", "notes-of-a-person.txt"}


@pytest.mark.slow
def test_help_imports_no_type_checker_and_a_run_no_help() -> None:
    program = """if True:
        import sys
        from stages.runtime.cli import stage_main
        from stages.reshard.config import ReshardConfig
        given = ["--load-dir", "a", "--save-dir", "b", "--num-shards", "2", "--dry-run"]
        assert stage_main("reshard", ReshardConfig, "stages.reshard.run", argv=given) == 0
        assert "tyro" not in sys.modules
        assert stage_main("reshard", ReshardConfig, "stages.reshard.run", argv=["--help"]) == 0
        print("loaded:", *sys.modules)
        """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = done.stdout.partition("loaded:")[2].split()
    assert "tyro" in loaded, done.stderr
    assert "typeguard" not in loaded


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
