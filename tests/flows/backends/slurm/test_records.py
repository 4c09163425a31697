"""What Slurm 22.05 printed, recorded from real clusters, as records."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.backends.outcome import Kind
from flows.backends.slurm.records import (
    ENDED,
    JobRecord,
    job_ids,
    parse_sacct,
    parse_scontrol,
    parse_submitted,
)

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


def only(name: str) -> JobRecord:
    (record,) = parse_scontrol(recorded(f"scontrol-{name}"))
    return record


@pytest.mark.parametrize(
    ("name", "state", "verdict", "code"),
    [
        ("completed", "COMPLETED", Kind.DONE, 0),
        ("failed", "FAILED", None, 3),
        ("cancelled", "CANCELLED", Kind.STOPPED, -15),
        ("timeout", "TIMEOUT", Kind.TIME_LIMIT, -15),
        ("node-fail", "NODE_FAIL", Kind.NODE_FAILURE, 0),
        ("preempted", "FAILED", Kind.PREEMPTED, 143),
    ],
)
def test_ends(name: str, state: str, verdict: Kind | None, code: int) -> None:
    record = only(name)
    assert (record.state, record.verdict, record.exit_code) == (state, verdict, code)
    assert record.has_ended


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        ("running", "RUNNING", ""),
        ("pending", "PENDING", "PartitionConfig"),
        ("requeued", "PENDING", "BeginTime"),
    ],
)
def test_lives(name: str, state: str, reason: str) -> None:
    record = only(name)
    assert (record.state, record.reason, record.has_ended) == (state, reason, False)


def test_a_requeued_job_keeps_its_name_and_counts_its_restarts() -> None:
    assert (only("requeued").name, only("requeued").restarts) == ("requeue-ab12-1", 1)
    assert only("running").restarts == 0


def test_the_message_names_a_lost_node() -> None:
    assert only("node-fail").summary == "Slurm says NODE_FAIL NodeDown on node2"


def test_tasks_of_an_array_are_records_of_one_job() -> None:
    records = parse_scontrol(recorded("scontrol-array-running"))
    assert {record.job_id for record in records} == {"4"}
    assert [(record.state, record.shares) for record in records] == [
        ("PENDING", (2, 3, 4, 5, 6, 9)),
        ("RUNNING", (1,)),
        ("RUNNING", (0,)),
    ]
    ended = parse_scontrol(recorded("scontrol-array-ended"))
    assert {record.shares[0]: record.exit_code for record in ended} == {
        index: index for index in (0, 1, 2, 3, 4, 5, 6, 9)
    }


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("1-7:3", (1, 4, 7)),
        ("0,2,5-7,16%4", (0, 2, 5, 6, 7, 16)),
        ("0,2,5-7,1...%4", (0, 2, 5, 6, 7)),
        ("0,2,5-...", (0, 2)),
        ("0,2,...", (0, 2)),
        ("...", ()),
    ],
)
def test_a_truncated_task_list_gives_the_listed_tasks(text: str, shares: tuple[int, ...]) -> None:
    line = recorded("scontrol-array-running").replace("ArrayTaskId=2-6,9", f"ArrayTaskId={text}")
    assert parse_scontrol(line)[0].shares == shares
    (row,) = parse_sacct(f"17_[{text}]|PENDING|0:0|None assigned|merge-ab12-1\n")
    assert (row.job_id, row.shares) == ("17", shares)


def test_text_of_people_in_a_job_is_not_parsed_as_its_state() -> None:
    line = recorded("scontrol-failed").replace(
        "WorkDir=", "Comment=JobState=COMPLETED ExitCode=0:0 JobId=9 WorkDir="
    )
    (record,) = parse_scontrol(line)
    assert (record.job_id, record.state, record.exit_code) == ("2", "FAILED", 3)


def test_a_shell_that_could_not_be_started_is_the_nodes_fault() -> None:
    line = recorded("scontrol-failed").replace("NonZeroExitCode", "JobLaunchFailure")
    assert parse_scontrol(line)[0].verdict is Kind.NODE_FAILURE


def test_a_job_that_slurm_holds_because_a_node_could_not_start_it() -> None:
    line = recorded("scontrol-requeued").replace("BeginTime", "launch_failed_requeued_held")
    assert parse_scontrol(line)[0].was_not_started
    assert not only("requeued").was_not_started


def test_a_job_that_failed_in_a_later_run_was_not_preempted_in_that() -> None:
    line = recorded("scontrol-preempted").replace("StartTime=2026-11-21", "StartTime=2026-11-22")
    assert parse_scontrol(line)[0].verdict is None


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("PartitionNodeLimit", "does not allow this many nodes"),
        ("QOSMaxCpuPerJobLimit", "more than its account or its quality of service allows"),
        ("AssocMaxGRESPerJob", "more than its account or its quality of service allows"),
    ],
)
def test_reasons_that_never_go_away(reason: str, words: str) -> None:
    line = recorded("scontrol-requeued").replace("BeginTime", reason)
    assert words in (parse_scontrol(line)[0].never_starts or "")
    running = line.replace("JobState=PENDING", "JobState=RUNNING")
    assert parse_scontrol(running)[0].never_starts is None


@pytest.mark.parametrize(
    "reason",
    ["BeginTime", "Resources", "JobHeldUser", "QOSMaxJobsPerUserLimit", "AssocGrpCpuLimit"],
)
def test_reasons_that_may_go_away(reason: str) -> None:
    line = recorded("scontrol-requeued").replace("BeginTime", reason)
    assert parse_scontrol(line)[0].never_starts is None


def test_nothing_is_nothing() -> None:
    assert parse_scontrol("") == []
    assert parse_scontrol("No jobs in the system\n") == []
    assert job_ids(recorded("squeue-none")) == []


def test_ids_of_tasks_are_that_of_their_job_once() -> None:
    assert job_ids(recorded("squeue-array")) == ["4"]
    assert job_ids("17_1\n17_[2-5]\n18\n") == ["17", "18"]


def test_rows_of_accounting() -> None:
    records = parse_sacct(recorded("sacct"))
    by_name = {record.name: record for record in records if not record.shares}
    assert by_name["merge-ab12-1"].verdict is Kind.DONE
    assert (by_name["merge-ab12-2"].state, by_name["merge-ab12-2"].exit_code) == ("FAILED", 3)
    assert by_name["pretrain-ab12-1"].state == "CANCELLED"
    tasks = {record.shares[0]: record.exit_code for record in records if record.shares}
    assert tasks == {0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize(
    "text", ["17\n", "17;cluster\n", "sbatch: lua: welcome\n17\n"], ids=["id", "cluster", "plugin"]
)
def test_the_id_that_sbatch_prints(text: str) -> None:
    assert parse_submitted(text) == "17"


def test_an_answer_of_sbatch_without_an_id_is_an_error() -> None:
    with pytest.raises(ValueError, match="printed no job id"):
        parse_submitted("thank you\n")


def test_transient_states_are_not_final() -> None:
    passing = {
        "PENDING",
        "RUNNING",
        "COMPLETING",
        "CONFIGURING",
        "SUSPENDED",
        "REQUEUED",
        "STOPPED",
    }
    assert not passing & set(ENDED)
