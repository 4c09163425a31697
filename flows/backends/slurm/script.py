"""A job as a script for sbatch: what a person could have written, and can run again by hand.

Pure: a LaunchSpec and a site's options in, text out. What people wrote reaches the shell in two
ways only: as words of an array, quoted by shlex, or as values that SlurmOptions checked."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from flows.backends.run_folder import LOG
from flows.backends.slurm.options import WORDS, SlurmOptions
from flows.backends.spec import LaunchSpec
from trainyard.errors import ConfigError

SCRIPT = "job.sbatch"
EXIT = "exit.json"

FOLDER = re.compile(r"/[A-Za-z0-9_./@+=:,-]*")
"""Slurm expands % and \\ in names of output files, and splits #SBATCH lines at spaces."""

NO_COMMENT = re.compile(r"[^A-Za-z0-9_.,:=+@/-]+")
"""What a comment may not have: sbatch splits lines at spaces, and a name may hold anything."""
COMMENT_CHARS = 200

MIB = 2**20
WIDTH = 100
OURS = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
"""Variables of the flow that have another meaning in the job."""

INHERITED = f"{OURS} TRAINYARD_LIFELINE_FD TRAINYARD_RANKS"

EXIT_DELAY_SECONDS = 10
RANKS_SHELL = """
trap "" USR1 TERM
"$@" &
launcher=$! delay={delay} status=127 again=yes warned=
on_signal() {{
  again=yes started=
  for children in /proc/"$launcher"/task/*/children; do
    ranks=unknown
    read -r ranks 2>/dev/null <"$children"
    for rank in $ranks; do
      started=yes
      ! ignores "$rank" || kill -KILL "$launcher" $ranks
    done
  done
  [ "$started" ] || kill -KILL "$launcher"
}}
ignores() {{
  while read -r name value; do
    [ "$name" != SigIgn: ] || return "$((0 == (0x$value & 0x200)))"
  done 2>/dev/null <"/proc/$1/status"
  return 1
}}
trap on_signal TERM
trap "warned=yes; on_signal" USR1
while [ "$again" ]; do
  again=
  wait "$launcher"
  code=$?
  [ "$code" = 127 ] || status=$code
done
trap "" USR1 TERM
if [ "$status" != 0 ]; then
  [ -z "$warned" ] || status=138
  sleep "$delay"
fi
exit "$status"
"""
"""Runs torchrun, and makes it ignore the signals that Slurm sends to every process of a step.

Otherwise torchrun dies of SIGUSR1 after the ranks have saved and exited. On SIGTERM it sends a
second one to its ranks, and SIGKILL 30 s later, whatever Slurm allows. But a rank inherits what
torchrun ignores until the stage begins (stages/runtime/cli.py), and would miss the signal. Without
all of its ranks nothing is trained: then the shell kills torchrun and its ranks. It uses builtins
only, since every program that it starts would get the next signal. (`wait` returns 127 for a
process that it has already waited for. Bit 0x200 of SigIgn is SIGUSR1.)

torchrun returns 1 for any failed rank, also for one that SIGUSR1 ended before it could report that.
So after SIGUSR1 the shell returns 138 for a failure, which a report of a rank outranks.

srun ends the tasks of all nodes as soon as one fails, and a training that saved and stopped fails.
So on several nodes, the shell delays a failure until the ranks of the other nodes have saved."""

WHY_A_RANKS_SHELL = "This shell keeps the signals of Slurm from torchrun; the ranks get them."

LAUNCHER_SIGNALS = "PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT"
"""Signals that torchrun handles: not SIGTERM, which stays ignored. Versions of torch without this
variable pass SIGTERM on."""

RENDEZVOUS_ID = r"""
# The id under which ranks meet, not to be guessed: as a variable, since all users see arguments.
PET_RDZV_ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$(od -An -N16 -tx8 /dev/urandom | tr -d ' \n')"
export PET_RDZV_ID
""".strip()

ENDING = f"""[ "$status" != 0 ] || status=$stopped

# Complete or absent, thanks to mv. The flow reads it even if Slurm has forgotten the job.
printf '{{"exit_status": %d, "job_id": "%s", "restarts": %d, "seconds": %d}}\\n' \\
  "$status" "$SLURM_JOB_ID" "${{SLURM_RESTART_COUNT:-0}}" "$SECONDS" \\
  >"$run/{EXIT}.$$" && mv -f "$run/{EXIT}.$$" "$run/{EXIT}"
exit "$status"
"""


def render_slurm(spec: LaunchSpec, options: SlurmOptions) -> str:
    """The text of the script; ConfigError for a job that cannot run on Slurm."""
    _check(spec, options)
    parts = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in sbatch_options(spec, options)),
        "",
        *_preamble(spec, options),
        *_run_folder(spec),
        *_command(spec, options),
        ENDING,
    ]
    return "\n".join(parts)


def job_name(spec: LaunchSpec) -> str:
    """The job name by which the submission is found again."""
    return f"{spec.name}-{spec.key}"


def comment(spec: LaunchSpec) -> str:
    """What `squeue -o %k` shows of the job: the flow run, which is named after its recipe."""
    words = NO_COMMENT.sub("_", spec.flow_run)
    return f"trainyard:{words[-COMMENT_CHARS:] or spec.key}"


def _check(spec: LaunchSpec, options: SlurmOptions) -> None:
    if not spec.key:
        raise ConfigError(f"job {spec.name}: Slurm needs a key by which the job is found again")
    if not FOLDER.fullmatch(spec.run_directory):
        raise ConfigError(
            f"run folder {spec.run_directory!r}: Slurm needs an absolute path of letters, digits "
            f"and '_ . / @ + = : , -', seen by every node; choose another yard"
        )
    if spec.image is not None and options.containers == "none":
        raise ConfigError(
            f"job {spec.name}: image {spec.image} needs the Slurm option containers, "
            f"'pyxis' or 'apptainer'"
        )
    if spec.image is None and spec.mounts:
        raise ConfigError(f"job {spec.name}: mounts are for images, and it has none")


# --- what sbatch reads --------------------------------------------------------------------------


def sbatch_options(spec: LaunchSpec, options: SlurmOptions) -> list[str]:
    """The options after `#SBATCH`."""
    wanted = spec.resources
    log = LOG if spec.shares is None else "log-%5a.txt"
    lines = [
        f"--job-name={job_name(spec)}",
        f"--comment={comment(spec)}",
        f"--output={PurePosixPath(spec.run_directory, log)}",
        "--open-mode=append",
        f"--{options.requeue}",
        f"--signal=USR1@{_warning(spec, options)}",
        f"--nodes={wanted.nodes}",
        "--ntasks-per-node=1",
    ]
    lines += _sizes(spec, options)
    for name in WORDS:
        if getattr(options, name) is not None:
            lines.append(f"--{name}={getattr(options, name)}")
    if options.exclusive:
        lines.append("--exclusive")
    if not options.inherit_environment:
        lines.append("--export=NONE")
    if spec.shares is not None:
        at_once = "" if spec.shares.at_once is None else f"%{spec.shares.at_once}"
        lines.append(f"--array={','.join(_ranges(spec.shares.indices))}{at_once}")
    return [*lines, *options.extra]


def _sizes(spec: LaunchSpec, options: SlurmOptions) -> Iterator[str]:
    wanted = spec.resources
    if wanted.cpus_per_node is not None:
        yield f"--cpus-per-task={wanted.cpus_per_node}"
    if wanted.gpus_per_node:
        kind = "gpu" if options.gpu_type is None else f"gpu:{options.gpu_type}"
        yield f"--gres={kind}:{wanted.gpus_per_node}"
    if wanted.memory_bytes_per_node is not None:
        yield f"--mem={math.ceil(wanted.memory_bytes_per_node / MIB)}M"
    elif options.exclusive:
        yield "--mem=0"
    if wanted.time_limit_seconds is not None:
        yield f"--time={time_text(wanted.time_limit_seconds)}"


def time_text(seconds: int) -> str:
    """D-HH:MM:SS in whole minutes, as Slurm counts them."""
    minutes = math.ceil(seconds / 60)
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def _warning(spec: LaunchSpec, options: SlurmOptions) -> int:
    limit = spec.resources.time_limit_seconds
    if limit is None:
        return options.warning_seconds
    return max(1, min(options.warning_seconds, math.ceil(limit / 60) * 60 // 4))


def _ranges(indices: tuple[int, ...]) -> Iterator[str]:
    """Runs of consecutive indices as Slurm writes them: 0-3, 7."""
    start = previous = indices[0]
    for index in (*indices[1:], -1):
        if index != previous + 1:
            yield str(start) if start == previous else f"{start}-{previous}"
            start = index
        previous = index


# --- what bash reads ----------------------------------------------------------------------------


def _preamble(spec: LaunchSpec, options: SlurmOptions) -> Iterator[str]:
    yield f"unset {INHERITED}"
    if options.setup_file is not None:
        yield f"source {shlex.quote(options.setup_file)}"
    yield "set -u"
    for name, value in spec.environment.items():
        yield f"export {name}={shlex.quote(value)}"
    yield "export PYTHONUNBUFFERED=1"
    if spec.has_ranks:
        yield f"export {LAUNCHER_SIGNALS}"


def _run_folder(spec: LaunchSpec) -> Iterator[str]:
    folder = shlex.quote(spec.run_directory)
    yield ""
    if spec.shares is None:
        yield f"run={folder}"
    else:
        yield f'run={folder}/share-"$SLURM_ARRAY_TASK_ID"'
    yield 'export TRAINYARD_RUN_DIR="$run"'
    yield 'mkdir -p "$run"'
    yield "# Remove the reports of an earlier run of this job, which Slurm requeued."
    yield f'rm -f "$run/failure.json" "$run/outcome.json" "$run/{EXIT}"'


def _command(spec: LaunchSpec, options: SlurmOptions) -> Iterator[str]:
    wanted = spec.resources
    yield ""
    if spec.has_ranks:
        yield 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        yield "port=$((20000 + SLURM_JOB_ID % 10000))"
        yield from RENDEZVOUS_ID.splitlines()
        yield "rendezvous=("
        yield f"  --nnodes={wanted.nodes} --nproc-per-node={wanted.processes_per_node}"
        yield '  --rdzv-backend=c10d --rdzv-endpoint="$head:$port"'
        yield "  --max-restarts=0 --no-python"
        yield ")"
        yield from _array_of("launcher", spec.rank_launcher)
    yield from _array_of("command", spec.command)
    if spec.shares is not None:
        yield f'command+=(--rank "$SLURM_ARRAY_TASK_ID" --world-size {spec.shares.count})'
    yield from _array_of("step", _step(spec, options))
    yield ""
    yield "# If the job is cancelled or out of time, bash waits for the step and keeps its status."
    yield "status=0 stopped=0"
    yield "trap 'stopped=143' TERM"
    if not spec.has_ranks:
        yield '"${step[@]}" "${command[@]}" || status=$?'
        return
    delay = EXIT_DELAY_SECONDS if wanted.nodes > 1 else 0
    shell = shlex.quote(RANKS_SHELL.format(delay=delay))
    yield f"# {WHY_A_RANKS_SHELL}"
    yield f'"${{step[@]}}" sh -c {shell} trainyard \\'
    yield '  "${launcher[@]}" "${rendezvous[@]}" "${command[@]}" || status=$?'


def _array_of(name: str, words: tuple[str, ...]) -> Iterator[str]:
    lines = list(_grouped(words))
    if len(whole := f"{name}=({' '.join(lines)})") <= WIDTH:
        yield whole
        return
    yield f"{name}=("
    yield from (f"  {line}" for line in lines)
    yield ")"


def _grouped(words: tuple[str, ...]) -> Iterator[str]:
    """Lines of quoted words; each option begins a line, with its values beside it."""
    line = ""
    for word in words:
        if line and word.startswith("--"):
            yield line
            line = ""
        line = f"{line} {_quoted(word)}".lstrip()
    yield line


def _quoted(word: str) -> str:
    text = shlex.quote(word)
    return f"'{text}'" if text == word and "," in word else text  # as shellcheck wants it


def _step(spec: LaunchSpec, options: SlurmOptions) -> tuple[str, ...]:
    """srun with its options, and what starts a container."""
    wanted = spec.resources
    words = ["srun", f"--nodes={wanted.nodes}", f"--ntasks={wanted.nodes}", "--ntasks-per-node=1"]
    if wanted.cpus_per_node is not None:  # srun has not taken it from sbatch since Slurm 22.05
        words.append(f"--cpus-per-task={wanted.cpus_per_node}")
    words += ["--kill-on-bad-exit=1", "--export=ALL"]
    words.append("--cpu-bind=none")  # the one task of a node starts processes for all its cores
    if wanted.nodes > 1:
        words.append("--label")
    if spec.image is None:
        if spec.working_directory is not None:
            words.append(f"--chdir={spec.working_directory}")
        return tuple(words)
    starter = {"pyxis": _pyxis, "apptainer": _apptainer}[options.containers]
    return (*words, *starter(spec))


def _pyxis(spec: LaunchSpec) -> Iterator[str]:
    yield f"--container-image={spec.image}"
    yield "--container-mounts=" + ",".join(_mounts(spec))
    yield "--no-container-mount-home"
    if spec.working_directory is not None:
        yield f"--container-workdir={spec.working_directory}"


def _apptainer(spec: LaunchSpec) -> Iterator[str]:
    yield from ("apptainer", "exec", "--no-home")
    if spec.resources.gpus_per_node:
        yield "--nv"
    for mount in _mounts(spec):
        yield from ("--bind", mount)
    if spec.working_directory is not None:
        yield from ("--pwd", spec.working_directory)
    assert spec.image is not None
    yield spec.image


def _mounts(spec: LaunchSpec) -> Iterator[str]:
    """source:target:mode"""
    for mount in spec.mounts_with_run_folder:
        yield f"{mount.source}:{mount.target}:{'ro' if mount.read_only else 'rw'}"
