"""Options of the Slurm backend: partition, account, how containers start.

The values go into a shell script without quotes, so each must match what Slurm accepts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from flows.backends.option_checks import check_choice, check_not_negative, check_pattern
from trainyard.errors import ConfigError

Containers = Literal["none", "pyxis", "apptainer"]
Requeue = Literal["requeue", "no-requeue"]

WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@+-]*")
"""A partition, an account, a quality of service; several are joined by commas."""
CONSTRAINT = re.compile(r"[A-Za-z0-9_.&|()\[\]*,:=-]+")
NODES = re.compile(r"[A-Za-z0-9_.,\[\]-]+")
GRES = re.compile(r"[A-Za-z0-9_]+(:[A-Za-z0-9_.-]+)*")
EXTRA = re.compile(r"--[a-z][a-z-]*(=[A-Za-z0-9_.,:@+/=\[\]-]+)?")
FILE = re.compile(r"/[A-Za-z0-9_./@+=-]*")

DECIDED = (
    *("job-name", "comment", "output", "error", "open-mode", "requeue", "no-requeue", "signal"),
    *("nodes", "ntasks-per-node", "array", "wrap", "parsable", "time", "chdir", "export"),
)
"""Options of sbatch that the job decides."""

REFUSED = {
    "wait": "sbatch would wait until the job has ended, and be killed before",
    "test-only": "nothing would be submitted",
    **dict.fromkeys(("help", "usage", "version"), "nothing would be submitted"),
    **dict.fromkeys(
        ("clusters", "cluster-constraint"),
        "jobs of other clusters are not followed; let SLURM_CONF name the one cluster",
    ),
}
"""Options of sbatch that prevent a job from being submitted or followed, and why."""
WHOLE = ("ntasks",)
"""Options of sbatch that look like an abbreviation of an option above."""

WORDS = {
    "partition": WORD,
    "account": WORD,
    "qos": WORD,
    "reservation": WORD,
    "constraint": CONSTRAINT,
    "nodelist": NODES,
    "exclude": NODES,
}
"""Options of sbatch that are passed through."""

OWN = (*WORDS, "exclusive", "gres")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """How jobs are submitted at a site: for all of them, or for those of one stage."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    """Features that nodes must have: `h100&nvlink`."""
    nodelist: str | None = None
    exclude: str | None = None
    """Nodes not to use: `node[3-5]`."""
    exclusive: bool = False
    """Whole nodes, with all their memory unless the job asks for less."""
    gpu_type: str | None = None
    """Of --gres=gpu:TYPE:COUNT; None: any."""
    warning_seconds: int = 300
    """SIGUSR1 comes this long before the time limit, at most a quarter of it, and training saves
    and stops. Slurm may be a minute early."""
    requeue: Requeue = "requeue"
    """Whether Slurm reruns a job that lost a node or was preempted, under the same id."""
    containers: Containers = "none"
    """The container runtime: Pyxis with enroot, Apptainer, or none."""
    setup_file: str | None = None
    """A file that every script sources first: `module load`, NCCL's variables."""
    inherit_environment: bool = True
    """Jobs inherit the environment of the flow, credentials of the store included."""
    broken_seconds: int = 300
    """How long a job that can never start, such as one for more nodes than its partition has, stays
    in the queue before it is cancelled."""
    room_seconds: int | None = 86400
    """How long to retry a submission while its account or quality of service allows no more jobs in
    the queue; None: no limit."""
    extra: tuple[str, ...] = ()
    """Other options of sbatch: `--switches=1`, `--mail-type=FAIL`."""

    def __post_init__(self) -> None:
        for name, pattern in WORDS.items():
            _check(name, getattr(self, name), pattern)
        _check("gpu_type", self.gpu_type, GRES)
        _check("setup_file", self.setup_file, FILE)
        if not 0 < self.warning_seconds <= 65535:
            raise ConfigError(
                f"Slurm option warning_seconds must be from 1 to 65535, got {self.warning_seconds}"
            )
        check_not_negative("Slurm", self, ("broken_seconds", "room_seconds"))
        check_choice("Slurm option containers", self.containers, get_args(Containers))
        check_choice("Slurm option requeue", self.requeue, get_args(Requeue))
        for option in self.extra:
            self._check_extra(option)

    def _check_extra(self, option: str) -> None:
        _check("extra", option, EXTRA)
        name = _in_full(option.removeprefix("--").partition("=")[0])
        if name in DECIDED:
            raise ConfigError(f"Slurm option extra: --{name} is decided by the job; leave it out")
        if name in REFUSED:
            raise ConfigError(f"Slurm option extra: --{name}: {REFUSED[name]}; leave it out")
        if name in OWN:
            raise ConfigError(f"Slurm option extra: --{name} has a key of its own; use that")


def _in_full(name: str) -> str:
    """The option above of which this may be an abbreviation, since sbatch accepts them."""
    known = (*DECIDED, *REFUSED, *OWN)
    if name in known or name in WHOLE:
        return name
    return next((one for one in known if one.startswith(name)), name)


def _check(name: str, value: str | None, pattern: re.Pattern[str]) -> None:
    check_pattern(f"Slurm option {name}", value, pattern)
