"""The end of a scheduled job, from what is left of each witness.

Reports of stages are those that stages write; tests/stages/test_pretrain_failures.py has such of
trainings that really lost a rank, hung and ran out of memory."""

from __future__ import annotations

import errno
import tempfile
from typing import Any

import pytest

from flows.backends.outcome import (
    EXIT_STATUS,
    RETRIED,
    JobEnd,
    Kind,
    Outcome,
    classify_exit,
    join_shares,
    read_failure,
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


def told(error: BaseException) -> dict[str, Any]:
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


STORE = told(InfrastructureError("store is away"))
DATA = {**told(DataError("a.jsonl:7: not JSON")), "step": 40}
OPTION = told(ConfigError("--lr must be positive"))
DEFECT = told(KeyError("x"))
GPU_MEMORY = told(DeviceMemoryError("rank 0 ran out of memory on cuda:0"))
HOST_MEMORY = told(HostMemoryError("rank 0 ran out of memory on the host"))
NCCL = told(CommunicationError("rank 0 of 2 lost its connection to another rank"))
HUNG = told(HangError("no rank has made progress for 600 s"))
SAVED = told(Stopped(10))
STOPPED = told(Stopped(15))
BY_OPTION = told(StoppedByOption("--exit-interval"))
OTHER_HARDWARE = told(RerunElsewhere("a step differs"))

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
        # --- a launcher of ranks says 1, whatever a rank said
        ({"exit_code": 1, "is_of_launcher": True}, Kind.UNKNOWN),
        ({"exit_code": 1, "is_of_launcher": True, "failure": OPTION}, Kind.CONFIG),
        ({"exit_code": 1, "is_of_launcher": True, "failure": SAVED}, Kind.TIME_LIMIT),
        (
            {"exit_code": 1, "is_of_launcher": True, "log_tail": TORCHRUN_LOST},
            Kind.COMMUNICATION,
        ),
        ({"exit_code": 137, "is_of_launcher": True, "log_tail": OOM_KILLED}, Kind.OUT_OF_MEMORY),
        # --- the log counts where nobody else knows
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
        ({"failure": STOPPED, "was_requeued": True, "ended_by_us": Kind.STOPPED}, Kind.STOPPED),
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
        ({"ended_by_us": Kind.STOPPED, "verdict": Kind.STOPPED}, Kind.STOPPED),
        ({"ended_by_us": Kind.STOPPED, "failure": SAVED, "exit_code": 138}, Kind.STOPPED),
        ({"ended_by_us": Kind.HANG, "verdict": Kind.STOPPED}, Kind.HANG),
        ({"ended_by_us": Kind.HANG, "failure": DATA}, Kind.DATA),
        ({"ended_by_us": Kind.STOPPED, "exit_code": 0}, Kind.DONE),
        # --- srun ends with 0 when it gives up waiting for a step that was cancelled
        ({"exit_code": 0, "verdict": Kind.STOPPED}, Kind.STOPPED),
        ({"exit_code": 0, "verdict": Kind.TIME_LIMIT, "failure": SAVED}, Kind.TIME_LIMIT),
        ({"exit_code": 0, "verdict": Kind.NODE_FAILURE}, Kind.NODE_FAILURE),
    ],
)
def test_who_is_believed(evidence: dict[str, Any], kind: Kind) -> None:
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
def test_errors_of_the_system_and_of_torch_say_in_any_stage_what_happened(
    error: Exception, kind: Kind
) -> None:
    assert classify_exit("reshard", JobEnd(failure=told(error))).kind is kind


def test_what_a_stage_reported_is_kept() -> None:
    outcome = classify_exit("tokenize", JobEnd(failure=DATA, exit_code=1, is_of_launcher=True))
    assert (outcome.message, outcome.error, outcome.step) == (DATA["message"], "DataError", 40)


def test_a_scheduler_adds_the_step_that_the_stage_reported_and_its_own_words() -> None:
    failure = {**SAVED, "step": 1200}
    seen = JobEnd(failure=failure, verdict=Kind.PREEMPTED, message="Slurm says PREEMPTED")
    outcome = classify_exit("pretrain", seen)
    assert outcome.step == 1200
    assert outcome.message == "preempted: other jobs took its nodes (Slurm says PREEMPTED)"


def test_every_kind_has_an_exit_status_and_only_infrastructure_is_retried() -> None:
    assert set(EXIT_STATUS) == set(Kind)
    assert {EXIT_STATUS[kind] for kind in RETRIED} == {3}
    assert set(Kind) - RETRIED == {
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
