"""Pretraining as a stage: what it writes, that it continues bit for bit, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stages.pretrain.config import PretrainConfig
from tests.stages.directly import run_process, wait_for_line
from tests.stages.pretrain_runs import OPTIONS, Pretrain, arguments, ledger, manifest
from tests.trainyard.datasets.test_gpt import write_pair
from trainyard.artifacts.manifest import FORCE
from trainyard.artifacts.parts import files_of_part
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.steps import find_steps
from trainyard.config import from_dict, leaves
from trainyard.errors import ConfigError
from trainyard.training.loop.ledger import parse_ledger
from trainyard.training.loop.length import length_of
from trainyard.training.loop.state import TrainState
from trainyard.training.run.dp_history import spans_of_step
from trainyard.training.run.resume_checks import check_samples_left


@pytest.fixture(scope="module")
def whole(pretrain: Pretrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    log = pretrain(folder, eval_at_start=True)
    assert " iteration        8/       8 | consumed samples:           32 | " in log
    assert "threads=1" in log
    return folder


@pytest.mark.slow
def test_a_run_folder_has_steps_ledger_and_timings(whole: Path) -> None:
    assert find_steps(str(whole)) == [3, 6, 8]
    lines = ledger(whole)
    assert [line["step"] for line in lines] == list(range(9))
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 4, 8]
    volatile = {file.path for file in manifest(whole).files if file.volatile}
    assert "timings.jsonl" in volatile
    timings = [json.loads(line) for line in (whole / "timings.jsonl").read_text().splitlines()]
    assert [line["step"] for line in timings] == list(range(1, 9))
    assert manifest(whole).metrics["validation_loss_first"] == lines[0]["validation_loss"]
    listed = {file.path for file in manifest(whole).files} | {"manifest.json"}
    for part in manifest(whole).parts:
        listed |= {file.path for file in files_of_part(str(whole), part)}
        listed.add(f"{part.path}/manifest.json")
    assert {str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file()} == listed


@pytest.mark.slow
def test_a_step_carries_configuration_and_tokenizer_without_paths(whole: Path) -> None:
    with open_checkpoint(str(whole)) as checkpoint:
        assert checkpoint.step == 8
        assert checkpoint.config["model"]["num_layers"] == 2
        assert checkpoint.config["vocab_size"] == 1001
        assert checkpoint.config["padded_vocab_size"] == 1024
        assert checkpoint.config["run"]["train_iters"] == 8
        assert str(whole.parent) not in json.dumps(checkpoint.config)
        assert (whole / "iter_0000008/tokenizer/trainyard_tokenizer.json").exists()


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(
    pretrain: Pretrain, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    pretrain(folder, eval_at_start=True, exit_interval=5, expect=128 + signal.SIGTERM)
    assert not (folder / "manifest.json").exists()
    assert find_steps(str(folder)) == [3, 5]
    log = pretrain(folder, eval_at_start=True)
    assert "resuming from step 5" in log
    assert find_steps(str(folder)) == [3, 6, 8]
    assert (folder / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert manifest(folder).output_digest == manifest(whole).output_digest


@pytest.mark.slow
def test_execution_options_do_not_rerun_a_finished_run(pretrain: Pretrain, whole: Path) -> None:
    log = pretrain(whole, eval_at_start=True, log_interval=1, log_throughput=True)
    assert "nothing to do" in log


@pytest.mark.slow
def test_force_trains_again_to_the_same_result(pretrain: Pretrain, tmp_path: Path) -> None:
    short = partial(pretrain, tmp_path / "run", train_iters=3, eval_iters=0)
    short()
    digest = manifest(tmp_path / "run").output_digest
    log = short("--force")
    assert "from initial weights" in log
    assert manifest(tmp_path / "run").output_digest == digest
    short("--force")
    aside = sorted(path.name for path in (tmp_path / "run" / "superseded").iterdir())
    assert [len(name) for name in aside] == [8, 10]  # LINEAGE, then LINEAGE-2: neither is lost


@pytest.mark.slow
def test_a_training_that_a_flow_run_forces_resumes_when_it_is_requeued(
    pretrain: Pretrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = partial(pretrain, tmp_path / "run", train_iters=4, eval_iters=0)
    short()
    monkeypatch.setenv(FORCE, "flow run")
    assert "from initial weights" in short(exit_interval=2, expect=143)
    assert "resuming from step 2" in short()
    assert "nothing to do" in short()


@pytest.mark.slow
def test_steps_of_another_seed_are_refused_or_set_aside(pretrain: Pretrain, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stop = {"eval_iters": 0, "train_iters": 6, "exit_interval": 4}
    pretrain(folder, **stop, expect=143)
    assert find_steps(str(folder)) == [3, 4]
    log = pretrain(folder, eval_iters=0, train_iters=2, seed=7, expect=2)
    assert "--seed is 7 here and 1234 there" in log
    assert find_steps(str(folder)) == [3, 4]
    log = pretrain(folder, eval_iters=0, train_iters=2, seed=7, new_run=True)
    assert "skipping step 3, 4" in log
    assert find_steps(str(folder)) == [2]
    (aside,) = (folder / "superseded").iterdir()
    assert find_steps(str(aside)) == [3, 4]
    pretrain(tmp_path / "longer", eval_iters=0, train_iters=6, load=str(aside))
    assert find_steps(str(tmp_path / "longer")) == [6]


@pytest.mark.slow
def test_load_equal_to_save_goes_on_and_does_not_start_over(
    pretrain: Pretrain, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    short = {"eval_iters": 0, "train_iters": 3}
    pretrain(folder, **short)
    longer = {**short, "train_iters": 6, "lr_decay_iters": 3, "load": str(folder)}
    log = pretrain(folder, **longer, seed=7, new_run=True, expect=2)
    assert "--new-run (or --force) to start at step 0: leave one of them out" in log
    assert find_steps(str(folder)) == [3]
    log = pretrain(folder, **longer)
    assert "resuming from step 3 with other options: --lr-decay-iters None -> 3, " in log
    assert "--train-iters 3 -> 6" in log
    assert [line["step"] for line in ledger(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_ranks_that_the_command_starts_go_on_and_start_over_too(
    pretrain: Pretrain, tmp_path: Path
) -> None:
    folder, options = tmp_path / "run", {"eval_iters": 0, "lr_decay_iters": 3, "nproc_per_node": 2}
    pretrain(folder, **options, train_iters=3)
    pretrain(folder, **options, train_iters=4)
    assert [one["last_step"] for one in manifest(folder).run["segments"]] == [3, 4]
    log = pretrain(folder, "--force", **options, train_iters=5)
    assert "from initial weights" in log
    assert [one["last_step"] for one in manifest(folder).run["segments"]] == [5]


@pytest.mark.slow
def test_a_change_of_code_alone_trains_nothing_anew(
    pretrain: Pretrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    short = partial(pretrain, folder, train_iters=3, eval_iters=0)
    short()
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    document["code"] = {"version": "0.0.9", "digest": "0" * 64}
    document["run"]["code_files"]["trainyard/optim/optimizer.py"] = "00000000"
    path.write_text(json.dumps(document))
    log = short()
    assert "made by version 0.0.9, and since then the code changed (version 0.0.9 -> " in log
    assert ": trainyard/optim/optimizer.py); a change of code alone makes nothing again" in log
    assert "nothing to do" in log
    monkeypatch.setenv("TRAINYARD_ON_CODE_CHANGE", "never")
    assert "TRAINYARD_ON_CODE_CHANGE must be keep or redo, got 'never'" in short(expect=2)
    monkeypatch.setenv("TRAINYARD_ON_CODE_CHANGE", "redo")
    assert "nothing to do" in short(on_code_change="keep")
    log = short()
    assert ": trainyard/optim/optimizer.py)" in log
    assert "from initial weights" in log


@pytest.mark.slow
def test_load_resumes_and_finetune_starts_over(
    pretrain: Pretrain, whole: Path, tmp_path: Path
) -> None:
    load = {"load": str(whole / "iter_0000003"), "lr_decay_iters": 8}
    pretrain(tmp_path / "on", **load)
    lines = ledger(tmp_path / "on")
    expected = ledger(whole)
    assert [line["lm_loss"] for line in lines] == [line["lm_loss"] for line in expected[4:]]

    tune = {"load": str(whole), "finetune": True, "train_iters": 2, "eval_iters": 0, "lr": 1e-4}
    pretrain(tmp_path / "tune", **tune)
    lines = ledger(tmp_path / "tune")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["lm_loss"] < expected[1]["lm_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"load": "{tmp}/nowhere"}, 1, "nowhere"),
        ({"load": "{whole}", "train_iters": 4}, 2, "nothing is left to train"),
        ({"load": "{whole}", "hidden_size": 32, "train_iters": 9}, 1, "of another shape"),
        ({"load": "{whole}", "vocab_size": 1002, "train_iters": 9}, 2, "another tokenizer"),
        ({"global_batch_size": 5}, 2, "--global-batch-size"),
        ({"split": "1,0,0"}, 2, "the valid split"),
        ({"vocab_size": 500}, 1, "outside the vocabulary of 500"),
        ({"finetune": True}, 2, "--finetune"),
        ({"tensor_model_parallel_size": 2}, 2, "1 rank does not fit the layout"),
        ({"device": "cuda"}, 2, "--device cuda"),
    ],
)
def test_impossible_options_are_refused_and_nothing_is_published(
    pretrain: Pretrain,
    whole: Path,
    tmp_path: Path,
    options: dict[str, Any],
    status: int,
    words: str,
) -> None:
    filled = {
        k: v.format(tmp=tmp_path, whole=whole) if isinstance(v, str) else v
        for k, v in options.items()
    }
    log = pretrain(tmp_path / "run", **filled, expect=status)
    assert words in log
    assert "Traceback" not in log
    assert find_steps(str(tmp_path / "run")) == []
    assert not (tmp_path / "run/manifest.json").exists()


@pytest.mark.slow
def test_checkpoints_of_another_program_are_kept(pretrain: Pretrain, tmp_path: Path) -> None:
    theirs = tmp_path / "run/iter_0000100/mp_rank_00/model_optim_rng.pt"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"months of work")
    log = pretrain(tmp_path / "run", expect=2)
    assert "was not written by trainyard" in log
    assert theirs.read_bytes() == b"months of work"


def test_a_checkpoint_beyond_the_data_of_this_run_is_refused(tokens: str) -> None:
    document = {**OPTIONS, "data_path": [tokens], "save": "x", "train_iters": 14}
    config = from_dict(PretrainConfig, document)
    state = TrainState(step=11, consumed_train_samples=704)
    length = length_of(replace(config.training, global_batch_size=2), 1, 16)
    check_samples_left(config, state, length, num_samples=710)
    with pytest.raises(ConfigError, match="end at 710, but the data of this run has 700"):
        check_samples_left(config, state, length, num_samples=700)


def test_every_flag_has_one_owner() -> None:
    names = [name for name, _, _ in leaves(PretrainConfig)]
    assert len(names) == len(set(names))


def test_load_equal_to_save_is_not_an_input(tokens: str) -> None:
    options = {**OPTIONS, "data_path": [tokens], "save": "x/run", "load": "x/run/"}
    config = from_dict(PretrainConfig, options)
    assert config.inputs()["load"] == ()
    with pytest.raises(ConfigError, match="--data-path"):
        from_dict(PretrainConfig, {**options, "data_path": []})


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stages.pretrain", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_run_resumes_after_sigterm(pretrain: Pretrain, tokens: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {"train_iters": 100_000, "log_interval": 1, "eval_iters": 0, "save_interval": 50_000}
    process = start(*arguments(tokens, folder, **options))
    wait_for_line(process, " iteration        3/")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    (step,) = find_steps(str(folder))
    assert step >= 3
    assert f"saved step {step}" in output
    last = output.splitlines()[-1]
    assert last.endswith(f"step {step} is saved; run the same command to resume")
    more = {**options, "exit_interval": step + 2}
    log = pretrain(folder, **more, expect=143)
    assert f"resuming from step {step}" in log
    with open_checkpoint(str(folder)) as checkpoint:
        lines = parse_ledger((Path(checkpoint.url) / "ledger.jsonl").read_bytes())
        assert [line["step"] for line in lines] == list(range(1, step + 3))


@pytest.mark.slow
def test_signal_to_the_process_group_saves_the_step(tokens: str, tmp_path: Path) -> None:
    options = {"train_iters": 100_000, "log_interval": 1, "eval_iters": 0, "num_workers": 2}
    process = start(*arguments(tokens, tmp_path / "run", **options))
    wait_for_line(process, " iteration        3/")
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert find_steps(str(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_train_stop_and_continue_as_one_run(tokens: str, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    # Long enough that the signal comes before the end on any machine.
    options = {"nproc_per_node": 2, "log_interval": 1, "train_iters": 120, "save_interval": 50}
    words = arguments(tokens, cut, **options)
    assert "ranks=2" in run_process(
        "stages.pretrain", *arguments(tokens, whole, **options), seconds=200
    )
    process = start(*words)
    wait_for_line(process, " iteration        9/")
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 143, output
    assert time.monotonic() - began < 30
    assert "resuming from step" in run_process("stages.pretrain", *words, seconds=200)
    assert (cut / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert manifest(cut).output_digest == manifest(whole).output_digest


@pytest.mark.slow
@pytest.mark.distributed
def test_a_validation_cut_short_on_two_ranks_is_repeated_on_one(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    train, valid = write_pair(data / "t", [60] * 40), write_pair(data / "v", [60] * 801)
    folder, options = tmp_path / "run", {"log_interval": 1, "full_validation": True}
    options |= {"train_iters": 6, "split": None, "save_interval": 4, "data_path": None}
    options |= {"train_data_path": train, "valid_data_path": valid}
    process = start(*arguments("", folder, **options, nproc_per_node=2))
    wait_for_line(process, " iteration        3/")
    time.sleep(0.5)  # into the validation behind step 4, of hundreds of batches: seconds
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 143, output
    assert "the next start validates step=4" in output
    assert "saved step 4 (asked to stop)" in output
    run_process("stages.pretrain", *arguments("", folder, **options), seconds=200)
    lines = ledger(folder)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert [line["step"] for line in lines if "validation_loss" in line] == [4, 6]
    spans = [tuple(span) for span in spans_of_step(str(folder), 6)]
    assert spans == [(1, 4, 2, 2), (5, 6, 1, 2)]
    assert [json.loads(x)["step"] for x in (folder / "timings.jsonl").open()] == list(range(1, 7))
