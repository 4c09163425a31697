"""What a site's Slurm wants to know besides the job: partition, account, how containers start.

Everything here ends up in a script that a shell reads, so each value is checked against what Slurm
itself accepts there; none needs quoting."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

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
"""Options of sbatch that are written from the job, and not to be given once more."""

REFUSED = {
    "wait": "sbatch would come back when the job has ended, and be killed before that",
    "test-only": "nothing would be submitted",
    **dict.fromkeys(("help", "usage", "version"), "nothing would be submitted"),
    **dict.fromkeys(
        ("clusters", "cluster-constraint"),
        "a job of another cluster is not followed; let SLURM_CONF name the one cluster",
    ),
}
"""Options of sbatch with which a job could not be submitted and followed, and why."""
WHOLE = ("ntasks",)
"""Options of sbatch that only look like one above that is cut short."""

WORDS = {
    "partition": WORD,
    "account": WORD,
    "qos": WORD,
    "reservation": WORD,
    "constraint": CONSTRAINT,
    "nodelist": NODES,
    "exclude": NODES,
}
"""Options of sbatch that are copied as they are."""

OWN = (*WORDS, "exclusive", "gres")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """How jobs are submitted at a site; the same for all of them, or for those of a stage."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    """Features that nodes must have: `h100&nvlink`."""
    nodelist: str | None = None
    exclude: str | None = None
    """Nodes not to be used: `node[3-5]`."""
    exclusive: bool = False
    """Whole nodes, with all of their memory unless the job states how much."""
    gpu_type: str | None = None
    """Of --gres=gpu:TYPE:COUNT; None: any."""
    warning_seconds: int = 300
    """SIGUSR1 comes so long before the time limit (at most a quarter of the limit before), and
    training saves and stops. Slurm may be a minute early."""
    requeue: Requeue = "requeue"
    """Whether Slurm runs a job again that lost a node or was preempted, under the same id."""
    containers: Containers = "none"
    """What starts an image: enroot through Pyxis, Apptainer, or nothing."""
    setup_file: str | None = None
    """A file of the site that every script sources first: `module load`, NCCL's variables."""
    inherit_environment: bool = True
    """Jobs see the environment of whoever submits, credentials of the store included."""
    broken_seconds: int = 300
    """So long a job may wait for what never comes, such as more nodes than its partition has,
    before it is cancelled."""
    room_seconds: int | None = 86400
    """So long a submission may wait while its account or quality of service has no room for more
    jobs in the queue; None: for ever."""
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
        for name in ("broken_seconds", "room_seconds"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(
                    f"Slurm option {name} must not be negative, got {getattr(self, name)}"
                )
        if self.containers not in get_args(Containers):
            raise ConfigError(
                f"Slurm option containers: {self.containers!r} is none of "
                f"{', '.join(get_args(Containers))}"
            )
        if self.requeue not in get_args(Requeue):
            raise ConfigError(
                f"Slurm option requeue: {self.requeue!r} is none of {', '.join(get_args(Requeue))}"
            )
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
            raise ConfigError(f"Slurm option extra: --{name} has a key of its own here; use that")


def _in_full(name: str) -> str:
    """The option of ours that sbatch may take this for: it lets people leave out the end."""
    known = (*DECIDED, *REFUSED, *OWN)
    if name in known or name in WHOLE:
        return name
    return next((one for one in known if one.startswith(name)), name)


def _check(name: str, value: str | None, pattern: re.Pattern[str]) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise ConfigError(
            f"Slurm option {name}: {value!r} is nothing that sbatch takes there "
            f"(it must match {pattern.pattern})"
        )
