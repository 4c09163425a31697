"""The folder of a Megatron-LM checkpoint in its `torch` format: which files there are of it.

latest_checkpointed_iteration.txt         a number, or `release`
iter_0000100/ or release/                 of one iteration
    mp_rank_TT/ or mp_rank_TT_PPP/        of tensor rank TT, pipeline rank PPP
        model_optim_rng.pt
        distrib_optim.pt                  with the distributed optimizer"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainyard.artifacts import store
from trainyard.artifacts.urls import basename, join
from trainyard.errors import ArtifactError

TRACKER = "latest_checkpointed_iteration.txt"
MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
BACKEND = "metadata.json"
"""Of `torch_dist`: written after everything else in the folder of an iteration."""
RELEASE = "release"

RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")


@dataclass(frozen=True, slots=True)
class MegatronFolder:
    """The files of one iteration."""

    url: str
    step: int
    """0 for a release."""
    files: tuple[tuple[str, ...], ...]
    """Names relative to the folder of the iteration, by pipeline rank, then by tensor rank."""
    has_distributed_optimizer: bool

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.files)

    @property
    def tp(self) -> int:
        """Tensor ranks."""
        return len(self.files[0])


def rank_folder(tp_rank: int, pp_rank: int, pp: int) -> str:
    """`mp_rank_01`, or with several pipeline ranks `mp_rank_01_000`."""
    return f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "")


def iteration_folder(step: int) -> str:
    """`iter_0000100`; step 0: `release`."""
    return f"iter_{step:07d}" if step else RELEASE


def marks_of(step: int) -> tuple[str, str]:
    """Files below the root that say that the checkpoint of a step is whole."""
    return TRACKER, f"{iteration_folder(step)}/{BACKEND}"


def find_iteration(url: str) -> tuple[str, int]:
    """Folder and step of the checkpoint at a root with a tracker file, or at the folder of one
    iteration; 0 is a release. Nothing of it is looked at but the tracker."""
    url = url.rstrip("/") or url
    if store.exists(join(url, TRACKER)):
        step, folder = _tracked(join(url, TRACKER))
        return join(url, folder), step
    match = re.fullmatch(r"iter_(\d+)", basename(url))
    return url, int(match[1]) if match else 0


def find_folder(url: str) -> MegatronFolder:
    """The checkpoint at a root with a tracker file, or at the folder of one iteration.

    Raises ArtifactError that says what is there instead."""
    return _read(*find_iteration(url))


def _tracked(url: str) -> tuple[int, str]:
    text = store.read_bytes(url)[:100].decode("ascii", "replace").strip()
    if text == RELEASE:
        return 0, RELEASE
    if not text.isdecimal():
        raise ArtifactError(f"{url}: holds {text!r}, wanted a number or `release`")
    return int(text), f"iter_{int(text):07d}"


def _read(url: str, step: int) -> MegatronFolder:
    names = list(store.list_files(url))
    ranks: dict[tuple[int, int], str] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        match = RANK_FOLDER.fullmatch(folder)
        if match and file == MODEL_FILE:
            if match[3]:
                raise ArtifactError(
                    f"{url}: {folder} is of an expert-parallel rank; mixtures of experts are not "
                    "read from this format"
                )
            ranks[int(match[2] or 0), int(match[1])] = name
    if not ranks:
        found = f"found {', '.join(names[:5])}" if names else "nothing is there"
        raise ArtifactError(f"{url}: no mp_rank_XX/{MODEL_FILE}; {found}")
    pp, tp = (1 + max(key[axis] for key in ranks) for axis in (0, 1))
    if pp > 1_000_000 or tp > 1_000_000 or len(ranks) != pp * tp:
        wanted = ((p, t) for p in range(pp) for t in range(tp) if (p, t) not in ranks)
        missing = [rank_folder(t, p, pp) for (p, t), _ in zip(wanted, range(5), strict=False)]
        raise ArtifactError(
            f"{url}: {len(ranks)} files of {tp} tensor x {pp} pipeline ranks; missing "
            f"{', '.join(missing)}"
        )
    files = tuple(tuple(ranks[p, t] for t in range(tp)) for p in range(pp))
    distributed = any(name.rpartition("/")[2] == OPTIMIZER_FILE for name in names)
    return MegatronFolder(url, step, files, distributed)
