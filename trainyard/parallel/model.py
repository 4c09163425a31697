"""The process groups that layers communicate over."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainyard.parallel.config import ContextCommunication


def group_size(group: ProcessGroup | None) -> int:
    """Ranks of a group; None is one rank alone."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This rank's place in a group; None is one rank alone."""
    return 0 if group is None else dist.get_rank(group)


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """How routed experts are spread over ranks. The default is one process alone."""

    group: ProcessGroup | None = None
    """Ranks that hold one copy of the experts of a layer: they exchange tokens."""
    ep_size: int = 1
    ep_rank: int = 0
    """Which part of the experts this rank holds."""
    tp_size: int = 1
    tp_rank: int = 0
    """Which part of each matrix of an expert this rank holds."""
    ep_of_rank: tuple[int, ...] = (0,)
    """The part of the experts that each rank of `group` holds."""


@dataclass(frozen=True, slots=True)
class ModelParallel:
    """Process groups and communication options of a layer. The default is one process alone."""

    tp: ProcessGroup | None = None
    """Ranks that share each matrix."""
    cp: ProcessGroup | None = None
    """Ranks that share each sequence."""
    sequence_parallel: bool = False
    """Shard activations between the matrices over `tp` along the sequence."""
    cp_comm_type: ContextCommunication = "p2p"
    """How attention reaches keys of other ranks."""
    tp_comm_overlap: bool = False
    """Overlap the communication of the matrices with their products."""
    tokens: ProcessGroup | None = None
    """Ranks that share the tokens of a micro-batch (tensor x context)."""
    same_time: ProcessGroup | None = None
    """Ranks of one pipeline stage: they see the micro-batches of all replicas at the same time."""
    experts: ExpertParallel = ExpertParallel()
    """Ranks that share routed experts."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return group_size(self.tp)

    @property
    def tp_rank(self) -> int:
        """Place among the tensor-parallel ranks."""
        return group_rank(self.tp)

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks."""
        return group_size(self.cp)

    @property
    def cp_rank(self) -> int:
        """Place among the context-parallel ranks."""
        return group_rank(self.cp)


ALONE = ModelParallel()
