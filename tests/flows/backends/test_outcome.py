"""What the end of a job means, from its exit code, its report, its scheduler and its log."""

from __future__ import annotations

import errno
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.backends.outcome import (
    EXIT_STATUS,
    RETRYABLE,
    JobEnd,
    Kind,
    Outcome,
    StageError,
    brief,
    classify,
    classify_exit,
    join_shares,
    read_failure,
    read_outcome,
)
from stages.runtime.failure import RUN_DIR, report_failure
from trainyard.errors import (
    CommunicationError,
    ConfigError,
    DataError,
    DeviceMemoryError,
    HangError,
    HostMemoryError,
    InfrastructureError,
    RerunElsewhere,
    Stopped,
    StoppedByOption,
)


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        (0, Kind.DONE, 0),
        (1, Kind.DATA, 1),
        (2, Kind.CONFIG, 2),
        (3, Kind.INFRASTRUCTURE, 3),
        (70, Kind.DEFECT, 70),
        (130, Kind.STOPPED, 130),
        (143, Kind.STOPPED, 143),
        (-15, Kind.STOPPED, 143),
        (-2, Kind.STOPPED, 130),
        (-9, Kind.INFRASTRUCTURE, 3),
        (137, Kind.INFRASTRUCTURE, 3),
        (-11, Kind.DEFECT, 70),
        (139, Kind.DEFECT, 70),
        (5, Kind.DEFECT, 70),
    ],
)
def test_an_exit_code_alone(code: int, kind: Kind, status: int) -> None:
    outcome = classify("job", code, None)
    assert (outcome.kind, outcome.exit_status) == (kind, status)
    assert bool(outcome.message) == (code != 0)
    assert outcome.is_retryable == (status == 3)


def test_failure_json_is_believed_before_the_code_that_a_launcher_left() -> None:
    failure = {"class": "DataError", "message": "a.jsonl:7: not JSON", "exit_status": 1, "step": 40}
    outcome = classify("job", 137, failure)
    assert (outcome.kind, outcome.exit_status) == (Kind.DATA, 1)
    assert (outcome.error, outcome.message, outcome.step) == (
        "DataError",
        "a.jsonl:7: not JSON",
        40,
    )


def test_a_failure_json_without_a_known_status_leaves_it_to_the_code() -> None:
    assert classify("job", 3, {"message": "?", "exit_status": 99}).kind is Kind.INFRASTRUCTURE
    assert classify("job", 1, {"exit_status": 0}).kind is Kind.DATA


def test_documents_of_a_run_folder(tmp_path: Path) -> None:
    assert read_failure(str(tmp_path)) is None
    (tmp_path / "failure.json").write_text('{"class": "Conf')
    assert read_failure(str(tmp_path)) is None
    (tmp_path / "outcome.json").write_text(json.dumps({"outcome": "noop"}))
    assert read_outcome(str(tmp_path)) == {"outcome": "noop"}


def test_the_error_names_step_and_cause_and_can_be_pickled() -> None:
    error = StageError(classify("pretrain", 3, {"message": "store is away", "step": 12}), "log.txt")
    assert str(error) == "pretrain: infrastructure after step 12: store is away"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.exit_status, copy.log) == (3, "log.txt")


def test_the_error_in_the_lines_of_prefect_is_one_that_a_person_reads() -> None:
    words = "no room for activations;\n  the plan was 12.1 GB, " + "try this, or that, " * 60
    failed = classify("pretrain", 3, {"message": words, "step": 1200, "class": "HostMemoryError"})
    error = StageError(failed, "/runs/pretrain/log.txt", "not tried again")
    shown = repr(error)
    assert shown.startswith(
        "pretrain: out of memory after step 1,200: no room for activations; the plan was 12.1 GB, "
    )
    assert shown.endswith(" ... (not tried again)")
    assert len(shown) < 250
    assert words in str(error)  # which is what a flow ends with


def test_an_error_with_nothing_to_say_ends_with_its_kind() -> None:
    error = StageError(Outcome(name="merge", kind=Kind.UNKNOWN, exit_status=3))
    assert str(error) == repr(error) == "merge: unknown"


@given(st.text(), st.integers(20, 200))
def test_brief_text_is_one_short_line(text: str, most: int) -> None:
    line = brief(text, most)
    assert len(line) <= most
    assert len(line.splitlines()) <= 1
    assert brief(line, most) == line
    if len(words := " ".join(text.split())) <= most:
        assert line == words


# --- behind a scheduler --------------------------------------------------------------------------


def report_of(error: BaseException) -> dict[str, Any]:
    """The failure.json of a stage that ends with this error."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setenv(RUN_DIR, folder)
        report_failure("pretrain", error, debug=False)
        failure = read_failure(folder)
    assert failure is not None
    return failure


class OutOfMemoryError(RuntimeError):
    """As torch's, which need not be loaded, is called and made."""


class DistBackendError(RuntimeError):
    """As torch's."""


STORE = report_of(InfrastructureError("store is away"))
DATA = {**report_of(DataError("a.jsonl:7: not JSON")), "step": 40}
OPTION = report_of(ConfigError("--lr must be positive"))
DEFECT = report_of(KeyError("x"))
GPU_MEMORY = report_of(DeviceMemoryError("rank 0 ran out of memory on cuda:0"))
HOST_MEMORY = report_of(HostMemoryError("rank 0 ran out of memory on the host"))
NCCL = report_of(CommunicationError("rank 0 of 2 lost its connection to another rank"))
HUNG = report_of(HangError("no rank has made progress for 600 s"))
SAVED = report_of(Stopped(10))
STOPPED = report_of(Stopped(15))
BY_OPTION = report_of(StoppedByOption("--exit-interval"))
OTHER_HARDWARE = report_of(RerunElsewhere("a step differs"))

TORCHRUN_LOST = "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection"
OOM_KILLED = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0."


@pytest.mark.parametrize(
    ("evidence", "kind"),
    [
        # --- one witness
        ({"exit_code": 0}, Kind.DONE),
        ({"verdict": Kind.DONE}, Kind.DONE),
        ({"failure": DATA}, Kind.DATA),
        ({"failure": OPTION}, Kind.CONFIG),
        ({"failure": DEFECT}, Kind.DEFECT),
        ({"failure": STORE}, Kind.INFRASTRUCTURE),
        ({"failure": GPU_MEMORY}, Kind.GPU_MEMORY),
        ({"failure": HOST_MEMORY}, Kind.OUT_OF_MEMORY),
        ({"failure": NCCL}, Kind.COMMUNICATION),
        ({"failure": HUNG}, Kind.HANG),
        ({"failure": SAVED}, Kind.TIME_LIMIT),
        ({"failure": STOPPED}, Kind.STOPPED),
        ({"failure": OTHER_HARDWARE}, Kind.INFRASTRUCTURE),
        ({"verdict": Kind.PREEMPTED}, Kind.PREEMPTED),
        ({"verdict": Kind.NODE_FAILURE}, Kind.NODE_FAILURE),
        ({"verdict": Kind.TIME_LIMIT}, Kind.TIME_LIMIT),
        ({"verdict": Kind.OUT_OF_MEMORY}, Kind.OUT_OF_MEMORY),
        ({"verdict": Kind.STOPPED}, Kind.STOPPED),
        ({"exit_code": 1}, Kind.DATA),
        ({"exit_code": 2}, Kind.CONFIG),
        ({"exit_code": 3}, Kind.INFRASTRUCTURE),
        ({"exit_code": 70}, Kind.DEFECT),
        ({"exit_code": 137}, Kind.INFRASTRUCTURE),
        ({"exit_code": 138}, Kind.TIME_LIMIT),
        ({"exit_code": 143}, Kind.STOPPED),
        ({"exit_code": -9}, Kind.INFRASTRUCTURE),
        ({}, Kind.UNKNOWN),
        # --- a launcher of ranks exits with 1 for every failure
        ({"exit_code": 1, "is_of_launcher": True}, Kind.UNKNOWN),
        ({"exit_code": 1, "is_of_launcher": True, "failure": OPTION}, Kind.CONFIG),
        ({"exit_code": 1, "is_of_launcher": True, "failure": SAVED}, Kind.TIME_LIMIT),
        (
            {"exit_code": 1, "is_of_launcher": True, "log_tail": TORCHRUN_LOST},
            Kind.COMMUNICATION,
        ),
        ({"exit_code": 137, "is_of_launcher": True, "log_tail": OOM_KILLED}, Kind.OUT_OF_MEMORY),
        # --- the log counts without another source
        ({"exit_code": 137, "log_tail": OOM_KILLED}, Kind.OUT_OF_MEMORY),
        ({"log_tail": "torch.OutOfMemoryError: CUDA out of memory."}, Kind.GPU_MEMORY),
        ({"log_tail": GPU_MEMORY["message"]}, Kind.GPU_MEMORY),
        ({"log_tail": HOST_MEMORY["message"]}, Kind.OUT_OF_MEMORY),
        ({"log_tail": HUNG["message"]}, Kind.HANG),
        ({"log_tail": NCCL["message"]}, Kind.COMMUNICATION),
        ({"log_tail": "[rank3]: NCCL error: unhandled system error"}, Kind.COMMUNICATION),
        ({"exit_code": 2, "log_tail": TORCHRUN_LOST}, Kind.CONFIG),
        ({"failure": DATA, "log_tail": OOM_KILLED}, Kind.DATA),
        # --- a lost node makes others report anything; a wrong option stays one
        ({"failure": STORE, "verdict": Kind.NODE_FAILURE}, Kind.NODE_FAILURE),
        ({"failure": NCCL, "verdict": Kind.NODE_FAILURE}, Kind.NODE_FAILURE),
        ({"failure": DEFECT, "verdict": Kind.NODE_FAILURE}, Kind.NODE_FAILURE),
        ({"failure": NCCL, "verdict": Kind.OUT_OF_MEMORY}, Kind.OUT_OF_MEMORY),
        ({"failure": HUNG, "verdict": Kind.NODE_FAILURE}, Kind.NODE_FAILURE),
        ({"failure": STOPPED, "verdict": Kind.PREEMPTED}, Kind.PREEMPTED),
        ({"failure": STOPPED, "verdict": Kind.TIME_LIMIT}, Kind.TIME_LIMIT),
        ({"failure": DATA, "verdict": Kind.NODE_FAILURE}, Kind.DATA),
        ({"failure": OPTION, "verdict": Kind.STOPPED}, Kind.CONFIG),
        ({"failure": DEFECT, "verdict": Kind.STOPPED}, Kind.DEFECT),
        # --- SIGTERM for an earlier run of a job that was requeued, and of others
        ({"failure": STOPPED, "was_requeued": True}, Kind.NODE_FAILURE),
        ({"failure": STOPPED, "was_requeued": True, "verdict": Kind.STOPPED}, Kind.STOPPED),
        ({"failure": STOPPED, "was_requeued": True, "stop_reason": Kind.STOPPED}, Kind.STOPPED),
        ({"failure": BY_OPTION, "was_requeued": True}, Kind.STOPPED),
        ({"failure": SAVED, "exit_code": 138, "was_requeued": True}, Kind.TIME_LIMIT),
        ({"exit_code": 143, "was_requeued": True}, Kind.NODE_FAILURE),
        ({"exit_code": 1, "was_requeued": True}, Kind.DATA),
        ({"exit_code": 1, "was_requeued": True, "is_of_launcher": True}, Kind.NODE_FAILURE),
        ({"exit_code": 137, "was_requeued": True, "is_of_launcher": True}, Kind.NODE_FAILURE),
        (
            {
                "exit_code": 137,
                "was_requeued": True,
                "is_of_launcher": True,
                "log_tail": OOM_KILLED,
            },
            Kind.OUT_OF_MEMORY,
        ),
        # --- ended by ourselves
        ({"stop_reason": Kind.STOPPED, "verdict": Kind.STOPPED}, Kind.STOPPED),
        ({"stop_reason": Kind.STOPPED, "failure": SAVED, "exit_code": 138}, Kind.STOPPED),
        ({"stop_reason": Kind.HANG, "verdict": Kind.STOPPED}, Kind.HANG),
        ({"stop_reason": Kind.HANG, "failure": DATA}, Kind.DATA),
        ({"stop_reason": Kind.STOPPED, "exit_code": 0}, Kind.DONE),
        # --- srun ends with 0 when it gives up waiting for a step that was cancelled
        ({"exit_code": 0, "verdict": Kind.STOPPED}, Kind.STOPPED),
        ({"exit_code": 0, "verdict": Kind.TIME_LIMIT, "failure": SAVED}, Kind.TIME_LIMIT),
        ({"exit_code": 0, "verdict": Kind.NODE_FAILURE}, Kind.NODE_FAILURE),
    ],
)
def test_end_of_a_scheduled_job_from_its_sources(evidence: dict[str, Any], kind: Kind) -> None:
    outcome = classify_exit("pretrain", JobEnd(**evidence))
    assert outcome.kind is kind
    assert outcome.name == "pretrain"
    assert bool(outcome.message) == (kind is not Kind.DONE)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), Kind.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Kind.OUT_OF_MEMORY),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 20480000000 bytes. Error code 12"
            ),
            Kind.OUT_OF_MEMORY,
        ),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), Kind.GPU_MEMORY),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
            Kind.GPU_MEMORY,
        ),
        (
            DistBackendError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"),
            Kind.GPU_MEMORY,
        ),
        (
            DistBackendError("ncclSystemError: ibv_create_cq failed: Cannot allocate memory"),
            Kind.COMMUNICATION,
        ),
        (DistBackendError("NCCL error: remote process exited"), Kind.COMMUNICATION),
        (OSError(errno.ENOSPC, "No space left on device"), Kind.INFRASTRUCTURE),
        (RuntimeError("the tensors do not fit"), Kind.DEFECT),
        (ValueError("out of memory"), Kind.DEFECT),
    ],
)
def test_errors_of_the_system_and_of_torch_have_a_kind(error: Exception, kind: Kind) -> None:
    assert classify_exit("reshard", JobEnd(failure=report_of(error))).kind is kind


def test_the_report_of_a_stage_is_kept() -> None:
    outcome = classify_exit("tokenize", JobEnd(failure=DATA, exit_code=1, is_of_launcher=True))
    assert (outcome.message, outcome.error, outcome.step) == (DATA["message"], "DataError", 40)


def test_the_message_has_the_reported_step_and_the_schedulers_reason() -> None:
    failure = {**SAVED, "step": 1200}
    seen = JobEnd(failure=failure, verdict=Kind.PREEMPTED, message="Slurm says PREEMPTED")
    outcome = classify_exit("pretrain", seen)
    assert outcome.step == 1200
    assert outcome.message == "preempted: other jobs took its nodes (Slurm says PREEMPTED)"


@pytest.mark.parametrize(
    "evidence",
    [{"failure": {**STOPPED, "step": 40}, "exit_code": 143}, {"exit_code": 143}],
    ids=["with a report", "without"],
)
def test_a_stray_signal_is_told_as_slurms(evidence: dict[str, Any]) -> None:
    seen = JobEnd(**evidence, was_requeued=True, message="job 17: Slurm says FAILED")
    outcome = classify_exit("pretrain", seen)
    assert outcome.message == (
        "Slurm requeued it, and then stopped the new run as if it were the old one "
        "(job 17: Slurm says FAILED)"
    )
    assert outcome.step == evidence.get("failure", {}).get("step")


def test_every_kind_has_an_exit_status_and_only_infrastructure_is_retried() -> None:
    assert set(EXIT_STATUS) == set(Kind)
    assert {EXIT_STATUS[kind] for kind in RETRYABLE} == {3}
    assert set(Kind) - RETRYABLE == {
        Kind.DONE,
        Kind.DATA,
        Kind.CONFIG,
        Kind.DEFECT,
        Kind.STOPPED,
        Kind.UNKNOWN,
    }


def share(kind: Kind) -> Outcome:
    return Outcome(name="tokenize", kind=kind, exit_status=EXIT_STATUS[kind], message=str(kind))


def test_shares_that_all_are_done_are_done() -> None:
    assert join_shares("tokenize", {0: share(Kind.DONE), 1: share(Kind.DONE)}).kind is Kind.DONE


def test_of_failed_shares_the_one_that_trying_again_cannot_mend_counts() -> None:
    ends = [Kind.DONE, Kind.PREEMPTED, Kind.DATA, Kind.NODE_FAILURE, Kind.DEFECT]
    outcome = join_shares("tokenize", {index: share(kind) for index, kind in enumerate(ends)})
    assert (outcome.kind, outcome.exit_status) == (Kind.DATA, 1)
    assert outcome.failed_shares == (1, 2, 3, 4)
    assert outcome.message.startswith("4 of 5 shares failed (1, 2, 3, 4); share 2: ")


def test_many_failed_shares_are_not_all_listed() -> None:
    outcome = join_shares("tokenize", {index: share(Kind.DATA) for index in range(100)})
    assert "100 of 100 shares failed (0, 1, 2, 3, 4, 5, 6, 7, ...)" in outcome.message
    assert len(outcome.failed_shares) == 100
