"""Non-persistent saves, on nodes (folders of one rank) or shared: resuming gives the same bits."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.stages.pretrain_runs import arguments
from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import certificate, check_kills, digest, go
from trainyard.artifacts import store
from trainyard.config import from_dict
from trainyard.errors import ConfigError
from trainyard.testing.pool import RankPool
from trainyard.training.options.node_local import NonPersistentConfig

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "global_batch_size": 4,
    "train_iters": 8,
    "save_interval": 4,
    "hidden_dropout": 0.1,
}
"""Durable at 4 and 8."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("tokens") / "t", [60] * 40)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def local(folder: Path, name: str = "node-$RANK", **options: Any) -> dict[str, Any]:
    return {
        "non_persistent_save_interval": 1,
        "non_persistent_ckpt_type": "local",
        "non_persistent_local_ckpt_dir": str(folder / name),
        **options,
    }


def steps(folder: Path) -> list[int]:
    """With a manifest, in the one run of a place, or in a run folder."""
    found = [*folder.glob("iter_*/manifest.json"), *folder.glob("*/iter_*/manifest.json")]
    return sorted(int(path.parent.name[5:]) for path in found)


@pytest.fixture
def whole(tokens: str, tmp_path: Path) -> str:
    """The digest of the run that nothing disturbs, and that has no saves between."""
    assert go(tokens, tmp_path / "whole", **SMALL) == "finished"
    return digest(tmp_path / "whole")


def resumes(
    tokens: str, run: Path, caplog: pytest.LogCaptureFixture, words: str, **options: Any
) -> None:
    """The run goes on, and says from where."""
    caplog.clear()
    assert go(tokens, run, **options) == "finished"
    assert words in caplog.text
    found = certificate(run)
    assert found.is_complete, found.sentence


# --- one rank -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_resumes_from_a_newer_step_of_its_node(
    tokens: str, whole: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, node = tmp_path / "run", tmp_path / "node"
    options = {**SMALL, **local(tmp_path, "node")}
    assert go(tokens, run, dies_after=6, **options) == "died"
    assert (steps(run), steps(node)) == ([4], [6])
    resumes(tokens, run, caplog, "resuming from node-local step 6 (1 folder on ", **options)
    assert f"{run} has step 4" in caplog.text
    assert digest(run) == whole
    assert not list(node.iterdir())  # a finished run leaves nothing there
    assert not (run / "non_persistent.json").exists()
    kinds = [json.loads(line)["kind"] for line in (run / "saves.jsonl").read_text().splitlines()]
    assert kinds == ["local"] * 3 + ["durable"] + ["local"] * 3 + ["durable"]


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk_of_a_node_logs_a_warning_and_training_continues(
    async_save: bool, tokens: str, whole: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, options = tmp_path / "run", {**SMALL, **local(tmp_path, "node"), "async_save": async_save}

    def full(operation: str, url: str) -> None:
        if "/node/" in url and operation == "publish" and "/optimizer-" in url:
            raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "observers", [full])
        assert go(tokens, run, dies_after=6, **options) == "died"
    assert "OSError: [Errno 28] No space left on device" in caplog.text
    assert (steps(run), list(tmp_path.glob("node/*/iter_*"))) == ([4], [])
    resumes(tokens, run, caplog, f"resuming from step 4 in {run}", **options)
    assert digest(run) == whole


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["sizes", "digests"])
def test_a_damaged_node_local_step_is_skipped_with_a_message(
    verify: str, tokens: str, whole: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, node = tmp_path / "run", tmp_path / "node"
    options = {**SMALL, **local(tmp_path, "node", non_persistent_keep_last=2)}
    options["verify_checkpoint"] = verify
    assert go(tokens, run, dies_after=7, **options) == "died"
    assert steps(node) == [6, 7]
    (path,) = node.glob("*/iter_0000007/optimizer-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data if verify == "digests" else data[:-1])
    resumes(tokens, run, caplog, "resuming from node-local step 6", **options)
    assert "skipping step 7 in " in caplog.text
    assert f"damaged: {path}: " in caplog.text
    assert digest(run) == whole


@pytest.mark.slow
def test_a_run_whose_folder_was_removed_starts_over(
    tokens: str, whole: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, node = tmp_path / "run", tmp_path / "node"
    options = {**SMALL, **local(tmp_path, "node")}
    assert go(tokens, run, dies_after=6, **options) == "died"
    (before,) = node.iterdir()
    shutil.rmtree(run)
    assert go(tokens, run, dies_after=2, **options) == "died"
    (after,) = node.iterdir()
    assert after != before  # the old one went, and was not gone on from
    assert steps(node) == [2]
    resumes(tokens, run, caplog, f"{run} has none", **options)
    assert digest(run) == whole


@pytest.mark.slow
def test_a_step_whose_ledger_leaves_a_gap_is_not_resumed(
    tokens: str, whole: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    options = {**SMALL, "save_interval": 2, **local(tmp_path, "node")}
    assert go(tokens, run, dies_after=5, **options) == "died"
    shutil.rmtree(run / "iter_0000004")
    resumes(tokens, run, caplog, f"resuming from step 2 in {run}", **options)
    assert "its ledger starts at step 5, but the last step of" in caplog.text
    assert go(tokens, tmp_path / "other", **{**SMALL, "save_interval": 2}) == "finished"
    assert digest(run) == digest(tmp_path / "other")


# --- copies in the background -------------------------------------------------------------------


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store to which the copy of a step lasts until step 5 is saved there."""
    is_saved = threading.Event()

    def wait(operation: str, url: str) -> None:
        if "/run/iter_0000005/manifest.json" in url:
            is_saved.set()
        is_copy = threading.current_thread().name == "lazy upload"
        if is_copy and operation == "open" and "/run/iter_" in url:
            is_saved.wait(20)
            time.sleep(0.3)

    monkeypatch.setattr(store, "observers", [wait])


def test_steps_of_a_node_are_copied_while_training_goes_on(
    tokens: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    seen: list[list[int]] = []

    def wait(operation: str, url: str) -> None:  # step 4 is not begun until step 3 is copied
        deadline = time.monotonic() + 20
        if operation == "open" and "/run/iter_0000004/" in url and not seen:
            while "kind=upload" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(steps(run))

    options = {**SMALL, **local(tmp_path, "node", non_persistent_upload=True)}
    monkeypatch.setattr(store, "observers", [wait])
    options["non_persistent_save_interval"] = 3
    assert go(tokens, run, dies_after=4, **options) == "died"
    assert "saved checkpoint step=3 kind=upload" in caplog.text
    assert seen == [[3]]
    assert steps(run) == [4]  # the copy served to continue from, until this was there


@pytest.mark.slow
def test_a_copy_of_an_older_step_is_cancelled(
    tokens: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, slow_copies: None
) -> None:
    run = tmp_path / "run"
    options = {**SMALL, **local(tmp_path, "node", non_persistent_upload=True)}
    # Asked to stop while step 3 is copied: the step that ends this part is saved, the copy is not.
    assert go(tokens, run, **{**options, "exit_interval": 5, "save_interval": 8}) == "paused"
    assert "stopped copying step" in caplog.text
    assert steps(run) == [5]
    assert sorted(path.name for path in run.glob("iter_*")) == ["iter_0000005"]
    resumes(tokens, run, caplog, "resuming from step 5 in ", **{**options, "save_interval": 8})


@pytest.mark.slow
def test_a_signal_during_a_copy_saves_and_leaves_no_torn_step(
    tokens: str, whole: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, sent = tmp_path / "run", []

    def signals(operation: str, url: str) -> None:
        is_copy = threading.current_thread().name == "lazy upload"
        if is_copy and operation == "open" and "/run/iter_" in url:
            if not sent:
                sent.append(url)
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    options = {**SMALL, **local(tmp_path, "node", non_persistent_upload=True)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "observers", [signals])
        assert go(tokens, run, **options) == "stopped"
    (stopped,) = steps(run)
    assert [path.name for path in run.glob("iter_*")] == [f"iter_{stopped:07d}"]
    resumes(tokens, run, caplog, f"resuming from step {stopped} in ", **options)
    assert digest(run) == whole


# --- several nodes ------------------------------------------------------------------------------

CUTS: dict[str, dict[str, Any]] = {
    "dp 2, zero": {"use_distributed_optimizer": True},
    "tp 2": {"tensor_model_parallel_size": 2},
    "dp 2, weights sharded, async": {"use_torch_fsdp2": True, "bf16": True, "async_save": True},
    "pp 2, async": {"pipeline_model_parallel_size": 2, "async_save": True},
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("lost", [False, True])
def test_a_run_resumes_from_the_steps_of_several_nodes(
    cut: str, lost: bool, tokens: str, ranks: RankPool, tmp_path: Path
) -> None:
    options = {**SMALL, **CUTS[cut]}
    assert go(tokens, tmp_path / "whole", ranks, 2, **options) == "finished"
    options |= local(tmp_path, "node-$RANK")
    run, nodes = tmp_path / "run", [tmp_path / "node-0", tmp_path / "node-1"]
    # Of an asynchronous save that is under way at a death, this waits for the end.
    assert go(tokens, run, ranks, 2, dies_after=6, **options) == "died"
    assert steps(run) == [4]
    held = [steps(node) for node in nodes]
    assert held == [[6], [6]]
    files = [{p.name for p in node.glob("*/iter_0000006/*.safetensors")} for node in nodes]
    assert files[0]
    assert files[1]
    assert not files[0] & files[1]
    if lost:
        shutil.rmtree(nodes[1])
    assert go(tokens, run, ranks, 2, **options) == "finished"
    assert digest(run) == digest(tmp_path / "whole")
    assert certificate(run).is_complete
    timed = [json.loads(line)["step"] for line in (run / "timings.jsonl").read_text().splitlines()]
    # Steps 5 and 6 are taken once more where nobody has them; times are kept at durable steps.
    assert timed == ([1, 2, 3, 4, 5, 6, 7, 8] if lost else [1, 2, 3, 4, 7, 8])


@pytest.mark.slow
@pytest.mark.distributed
def test_more_nodes_can_read_a_step_than_wrote_it(
    tokens: str, ranks: RankPool, tmp_path: Path
) -> None:
    options = {**SMALL, **local(tmp_path, "node-$RANK"), "micro_batch_size": 1}
    options["use_distributed_optimizer"] = True
    run = tmp_path / "run"
    assert go(tokens, run, ranks, 2, dies_after=6, **options) == "died"
    (before,) = (tmp_path / "node-1").glob("*/iter_0000006/model-*")
    shutil.rmtree(run / "iter_0000004")
    (run / "iter_0000004").mkdir()  # nothing but the nodes has what follows
    options |= {"exit_interval": 7, "tensor_model_parallel_size": 2}
    assert go(tokens, run, ranks, 4, **options) == "paused"
    state = json.loads((run / "iter_0000007/state.json").read_text())
    assert state["consumed_train_samples"] == 7 * 4
    lines = (run / "iter_0000007/ledger.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 7
    assert before.name.startswith("model-")


@pytest.mark.slow
@pytest.mark.distributed
def test_global_saves_go_to_one_shared_folder(tokens: str, ranks: RankPool, tmp_path: Path) -> None:
    options = {**SMALL, "use_distributed_optimizer": True}
    assert go(tokens, tmp_path / "whole", ranks, 2, **options) == "finished"
    options |= {"non_persistent_save_interval": 1, "non_persistent_ckpt_type": "global"}
    run = tmp_path / "run"
    assert go(tokens, run, ranks, 2, dies_after=6, **options) == "died"
    assert steps(run / "non_persistent") == [6]
    assert go(tokens, run, ranks, 2, **options) == "finished"
    assert digest(run) == digest(tmp_path / "whole")


# --- killed by the system -----------------------------------------------------------------------


@pytest.mark.kill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["waited for", "async"])
def test_a_run_with_saves_on_its_node_survives_a_kill_anywhere(
    way: str, tokens: str, tmp_path: Path
) -> None:
    """SIGKILL before the n-th operation of a store: of the folder of the node, of the run folder,
    of a copy from the one to the other."""

    def words(name: str) -> list[str]:
        node = tmp_path / "node" / name
        flags = arguments(tokens, tmp_path / name, hidden_dropout=0.1, save_interval=4)
        flags += ["--non-persistent-save-interval", "1", "--non-persistent-ckpt-type", "local"]
        flags += ["--non-persistent-local-ckpt-dir", str(node), "--non-persistent-upload"]
        return [*flags, "--async-save"] if way == "async" else flags

    check_kills(tmp_path, words, points=8)
    runs = [path for path in tmp_path.iterdir() if (path / "manifest.json").exists()]
    assert len(runs) >= 10
    for run in runs:
        found = certificate(run)
        assert found.is_complete, found.sentence


# --- what cannot be meant -----------------------------------------------------------------------

LOCAL = {"non_persistent_ckpt_type": "local", "non_persistent_save_interval": 5}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"non_persistent_save_interval": 5}, "save-interval needs --non-persistent-ckpt-type"),
        ({"non_persistent_ckpt_type": "global"}, "ckpt-type needs --non-persistent-save-interval"),
        (LOCAL, "--non-persistent-local-ckpt-dir go together"),
        ({"non_persistent_ckpt_type": "in_memory"}, "in_memory: such a copy would be lost with"),
        ({**LOCAL, "non_persistent_save_interval": 0}, "must be at least 1, got 0"),
        (
            {**LOCAL, "non_persistent_local_ckpt_dir": "/x", "non_persistent_keep_last": 0},
            "--non-persistent-keep-last must be at least 1",
        ),
        ({"non_persistent_upload": True}, "--non-persistent-upload needs"),
        ({"non_persistent_global_ckpt_dir": "/x"}, "needs --non-persistent-ckpt-type global"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_dict(NonPersistentConfig, options)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("/x/$NO_SUCH_VARIABLE", r"\$NO_SUCH_VARIABLE is not set on the node of rank"),
        ("s3://bucket/x", "not a local folder"),
    ],
)
def test_an_invalid_local_folder_is_refused(
    folder: str, words: str, tokens: str, tmp_path: Path
) -> None:
    options = {**SMALL, **local(tmp_path), "non_persistent_local_ckpt_dir": folder}
    with pytest.raises(ConfigError, match=words):
        go(tokens, tmp_path / "run", **options)
    assert not list((tmp_path / "run").glob("iter_*"))
