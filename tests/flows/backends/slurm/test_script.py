"""Scripts for sbatch: golden files, how bash reads them, and refused jobs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flows.backends.slurm.options import SlurmOptions
from flows.backends.slurm.script import comment, render_slurm, sbatch_options, time_text
from flows.backends.spec import LaunchSpec, Mount, Resources, Shares
from tests.flows.backends.goldens import check_golden_script
from trainyard.errors import ConfigError

RUN = "/lustre/yard/gpt3/.runs/pretrain/7c1f0d9a2b3e4f56-1"
HOUR = 3600
GIB = 2**30


def spec(**values: Any) -> LaunchSpec:
    command = ("python", "-m", "stages.merge", "--config", f"{RUN}/config.toml")
    given = {"name": "merge", "command": command, "run_directory": RUN, "key": "7c1f-1"}
    return LaunchSpec(**{**given, **values})


AT_A_SITE = SlurmOptions(partition="h100", constraint="nvlink&ib", extra=("--switches=4@10:00",))

CASES: dict[str, tuple[LaunchSpec, SlurmOptions]] = {
    "one-process": (spec(), SlurmOptions()),
    "two-nodes-in-a-bare-environment": (
        spec(
            name="pretrain",
            rank_launcher=("/opt/yard/bin/python", "-m", "torch.distributed.run"),
            working_directory="/opt/my yard",
            environment={"WORDS": 'it\'s $HOME `ls` "and" more'},
            resources=Resources(nodes=2, processes_per_node=4, memory_bytes_per_node=3 * GIB + 1),
        ),
        SlurmOptions(setup_file="/opt/site/modules.sh", requeue="no-requeue"),
    ),
    "shares-again": (
        spec(name="tokenize", shares=Shares(count=64, only=(9, 3, 4, 5), at_once=8)),
        SlurmOptions(inherit_environment=False, exclude="node[3-5]"),
    ),
    "apptainer-on-gpus": (
        spec(
            image="/images/yard.sif",
            mounts=(Mount(source="/data", target="/data"),),
            working_directory="/work",
            resources=Resources(gpus_per_node=1, time_limit_seconds=600),
        ),
        SlurmOptions(containers="apptainer", gpu_type="a100"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_scripts_match_their_golden_files(case: str) -> None:
    check_golden_script(f"slurm-{case}.sbatch", render_slurm(*CASES[case]))


def test_rendering_is_a_function_of_what_it_is_given() -> None:
    job = spec(key="7c1f0d9a2b3e4f56-1")
    assert render_slurm(job, AT_A_SITE) == render_slurm(job, AT_A_SITE)
    assert "7c1f0d9a2b3e4f56-1" in sbatch_options(job, AT_A_SITE)[0]


def test_comment_names_the_flow_run() -> None:
    named = spec(flow_run="quickstart lr=0.002 11-23 17:05 0193e1f6-6f0c-7d4b-b0a5-1f2e3d4c5b6a")
    wanted = "quickstart_lr=0.002_11-23_17:05_0193e1f6-6f0c-7d4b-b0a5-1f2e3d4c5b6a"
    assert f"--comment=trainyard:{wanted}" in sbatch_options(named, SlurmOptions())
    assert "--comment=trainyard:7c1f-1" in sbatch_options(spec(), SlurmOptions())


@given(st.text(max_size=300))
@example("a\n#SBATCH --uid=0\ntouch /tmp/x; $(id) `id` 'b' \"c\" \\")
def test_comment_is_one_word_whatever_a_run_is_called(text: str) -> None:
    shown = comment(spec(flow_run=text))
    assert re.fullmatch(r"trainyard:[\w.,:=+@/-]{1,200}", shown, re.ASCII)


# --- run as bash runs it, with stand-ins for Slurm's two programs -------------------------------

SHOW_RENDEZVOUS_ID = '#!/bin/sh\nprintf "%s\\0" "$PET_RDZV_ID" >"$SAID"\n'
SHOW_ARGUMENTS = (
    '#!/bin/sh\nfor word; do printf "%s\\0" "$word"; done >"$SAID"\nexit "${CODE:-0}"\n'
)
GO_ON = '#!/bin/sh\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n'


def execute(
    folder: Path, job: LaunchSpec, srun: str, site: SlurmOptions | None = None, **variables: str
) -> int:
    """Run a rendered script with a `srun` of our own; its exit status."""
    for name, text in {"srun": srun, "scontrol": "#!/bin/sh\necho node7\necho node8\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[7-8]", "SAID": str(folder / "s")}
    path = f"{folder}:{os.environ['PATH']}"
    script = render_slurm(job, site or SlurmOptions())
    return subprocess.run(
        ["bash"], input=script, text=True, env={"PATH": path, **slurm, **variables}
    ).returncode


def words(folder: Path) -> list[str]:
    return (folder / "s").read_text().split("\0")[:-1]


def test_ranks_meet_at_the_first_node_under_an_id_of_this_run_alone(tmp_path: Path) -> None:
    job = spec(run_directory=str(tmp_path / "run"), resources=Resources(nodes=2))
    assert execute(tmp_path, job, SHOW_ARGUMENTS, SLURM_RESTART_COUNT="3") == 0
    arguments = words(tmp_path)
    assert "--rdzv-endpoint=node7:22345" in arguments
    assert arguments[-len(job.command) - 1 :] == ["--no-python", *job.command]
    ids = set()
    for _ in range(2):
        assert execute(tmp_path, job, SHOW_RENDEZVOUS_ID, SLURM_RESTART_COUNT="3") == 0
        ids.update(words(tmp_path))
    assert len(ids) == 2
    assert all(one.startswith("12345-3-") for one in ids)


@pytest.mark.parametrize("code", [0, 2, 143])
def test_the_exit_file_has_the_status_of_the_step(tmp_path: Path, code: int) -> None:
    job = spec(run_directory=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/failure.json").write_text("of an earlier run")
    assert execute(tmp_path, job, SHOW_ARGUMENTS, CODE=str(code)) == code
    recorded = json.loads((tmp_path / "run/exit.json").read_text())
    assert (recorded["exit_status"], recorded["job_id"], recorded["restarts"]) == (code, "12345", 0)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["exit.json"]


STEP_THAT_ENDS_WELL_WHEN_CANCELLED = "#!/bin/sh\nkill -TERM $PPID\nsleep 0.2\n"


def test_a_stopped_script_does_not_exit_with_0(tmp_path: Path) -> None:
    job = spec(run_directory=str(tmp_path / "run"))
    assert execute(tmp_path, job, STEP_THAT_ENDS_WELL_WHEN_CANCELLED) == 143
    assert json.loads((tmp_path / "run/exit.json").read_text())["exit_status"] == 143


def test_sigusr1_ends_a_process_that_has_no_handler_yet(tmp_path: Path) -> None:
    warned = ("sh", "-c", "kill -USR1 $$; exit 0")
    job = spec(run_directory=str(tmp_path / "run"), command=warned)
    assert execute(tmp_path, job, GO_ON) == 128 + signal.SIGUSR1
    assert json.loads((tmp_path / "run/exit.json").read_text())["exit_status"] == 138


def test_a_share_gets_its_rank_and_a_folder_of_its_own(tmp_path: Path) -> None:
    job = spec(run_directory=str(tmp_path / "run"), shares=Shares(count=64))
    assert execute(tmp_path, job, SHOW_ARGUMENTS, SLURM_ARRAY_TASK_ID="7") == 0
    assert words(tmp_path)[-4:] == ["--rank", "7", "--world-size", "64"]
    assert (tmp_path / "run/share-7/exit.json").exists()


@settings(max_examples=25)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40))
def test_text_of_people_arrives_unchanged(text: str) -> None:
    job = spec(command=("program", text), environment={"VALUE": text})
    script = render_slurm(job, SlurmOptions())
    start, end = script.index("command=("), script.index("step=(")
    program = f'{script[start:end]}\nexport VALUE={shlex.quote(text)}\nprintf %s "${{command[1]}}"'
    heard = subprocess.run(["bash", "-c", program], capture_output=True, check=True)
    assert heard.stdout == text.encode()
    assert f"export VALUE={shlex.quote(text)}\n" in script


def test_the_environment_reaches_the_command_and_a_launchers_does_not(tmp_path: Path) -> None:
    show = ("sh", "-c", 'printf "%s|" "$WORDS" "${RANK-none}" "$TRAINYARD_RUN_DIR" >"$SAID"')
    run = str(tmp_path / "run")
    job = spec(command=show, run_directory=run, environment={"WORDS": "it's $HOME"})
    assert execute(tmp_path, job, GO_ON, RANK="5") == 0
    assert (tmp_path / "s").read_text() == f"it's $HOME|none|{run}|"


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1, "0-00:01:00"), (60, "0-00:01:00"), (61, "0-00:02:00"), (90061, "1-01:02:00")],
)
def test_time_limits_are_whole_minutes(seconds: int, text: str) -> None:
    assert time_text(seconds) == text


def test_whole_nodes_come_with_all_of_their_memory_unless_it_is_stated() -> None:
    whole = SlurmOptions(exclusive=True)
    assert {"--exclusive", "--mem=0"} <= set(sbatch_options(spec(), whole))
    stated = sbatch_options(spec(resources=Resources(memory_bytes_per_node=GIB)), whole)
    assert "--mem=1024M" in stated
    assert "--mem=0" not in stated


@pytest.mark.parametrize(("limit", "warning"), [(None, 300), (4 * HOUR, 300), (600, 150), (1, 15)])
def test_the_warning_leaves_a_short_job_its_time(limit: int | None, warning: int) -> None:
    options = sbatch_options(spec(resources=Resources(time_limit_seconds=limit)), SlurmOptions())
    assert f"--signal=USR1@{warning}" in options


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "site", "message"),
    [
        ({"key": ""}, {}, "needs a key"),
        ({"run_directory": "runs/1"}, {}, "needs an absolute path"),
        ({"run_directory": "/yard/100%j"}, {}, "needs an absolute path"),
        ({"run_directory": "/my yard/x"}, {}, "needs an absolute path"),
        ({"image": "yard:1"}, {}, "needs the Slurm option containers"),
        (
            {"mounts": (Mount(source="/a", target="/a"),)},
            {"containers": "pyxis"},
            "mounts are for images",
        ),
    ],
)
def test_invalid_job_is_refused(values: dict[str, Any], site: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render_slurm(spec(**values), SlurmOptions(**site))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("partition", "a b", "option partition: 'a b' is not valid"),
        ("account", "x\n#SBATCH --uid=0", "option account"),
        ("qos", "$(id)", "option qos"),
        ("constraint", "a;b", "option constraint"),
        ("exclude", "node1 node2", "option exclude"),
        ("gpu_type", "h100 ", "option gpu_type"),
        ("setup_file", "modules.sh", "option setup_file"),
        ("extra", ("--wrap=rm -rf",), "option extra"),
        ("extra", ("--wrap=x",), "--wrap is decided by the job"),
        ("extra", ("--nodes=4",), "--nodes is decided by the job"),
        ("extra", ("--partition=x",), "--partition has a key of its own"),
        ("extra", ("-p",), "option extra"),
        ("extra", ("--wait",), "--wait: sbatch would wait until the job has ended"),
        ("extra", ("--test-only",), "--test-only: nothing would be submitted"),
        ("extra", ("--clusters=other",), "--clusters: jobs of other clusters are not followed"),
        ("extra", ("--cluster-constraint=x",), "--cluster-constraint: jobs of other clusters"),
        ("extra", ("--parsable",), "--parsable is decided by the job"),
        ("extra", ("--out=x",), "--output is decided by the job"),
        ("extra", ("--wai",), "--wait: sbatch"),
        ("extra", ("--part=x",), "--partition has a key of its own"),
        ("room_seconds", -1, "room_seconds must not be negative"),
        ("warning_seconds", 0, "warning_seconds must be from 1 to 65535"),
        ("containers", "docker", "'docker' is not one of none, pyxis, apptainer"),
        ("requeue", "yes", "'yes' is not one of"),
    ],
)
def test_invalid_sbatch_options_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlurmOptions(**{option: value})


def test_options_that_only_look_like_those_of_a_job_are_passed_on() -> None:
    extra = ("--wait-all-nodes=1", "--ntasks=2", "--hold", "--time-min=10", "--gres-flags=x")
    lines = render_slurm(spec(), SlurmOptions(extra=extra)).splitlines()
    assert {f"#SBATCH {option}" for option in extra} <= set(lines)
