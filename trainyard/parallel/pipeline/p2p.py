"""Tensors between the ranks of a pipeline, over gloo or NCCL.

Both sides know shape and dtype, so nothing is negotiated. Every direction of every pair of
neighbours is a separate channel, for activations and for gradients. Messages of one channel arrive
in order, and channels do not wait for each other. On NCCL a channel is a communicator of two ranks
with its own stream, since sends and receives of one communicator run in the order of their calls;
on gloo it is a range of tags.

A receive is posted ahead (program.py decides when), and taking it makes the current stream wait. A
send is waited for before the next one of its channel; until then its tensor is kept alive. On CUDA
the host never waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from trainyard.parallel.comm_errors import communicating
from trainyard.parallel.groups import ProcessGroups
from trainyard.parallel.pipeline.schedule import Kind, Message

Channel = tuple[Kind, int, int]
"""Kind of message, sending pipeline rank, receiving pipeline rank."""

TAGS = 1 << 16
"""Tags of a channel; far more than messages in flight."""


@dataclass(frozen=True, slots=True)
class HiddenSpec:
    """Shape, dtype and device of the tensors between stages."""

    shape: tuple[int, int, int]
    """(s_local, b, h): the part of the sequence that a rank has, micro-batch, hidden."""
    dtype: torch.dtype
    device: torch.device


class PipelineLinks:
    """What one rank sends to its neighbours and receives from them; `connect` makes them."""

    def __init__(
        self,
        group: ProcessGroup,
        hidden: HiddenSpec,
        pairs: Mapping[Channel, ProcessGroup] | None = None,
    ) -> None:
        """group: the ranks of a pipeline, in order. pairs: on NCCL, a group of two ranks for each
        channel that ends here."""
        self.pp = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.hidden = hidden
        self._group = group
        self._posted: dict[Message, tuple[Work, Tensor]] = {}
        self._sends: dict[Channel, tuple[Work, Tensor, Message]] = {}
        self._counts: dict[Channel, int] = defaultdict(int)
        self._pairs = dict(pairs or {})

    @contextmanager
    def filled(self, share: Fraction) -> Iterator[None]:
        """Messages of micro-batches that have only this share of their samples."""
        whole = self.hidden
        tokens, batch, width = whole.shape
        self.hidden = replace(whole, shape=(tokens, int(batch * share), width))
        try:
            yield
        finally:
            self.hidden = whole

    # --- receiving ----------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        """Begin to receive."""
        buffer = torch.empty(self.hidden.shape, dtype=self.hidden.dtype, device=self.hidden.device)
        with communicating(f"pipeline: receiving {message}"):
            work = self._begin(message.channel, buffer)
        self._posted[message] = work, buffer

    def take(self, message: Message) -> Tensor:
        """The received tensor, which belongs to the caller."""
        work, buffer = self._posted.pop(message)
        with communicating(f"pipeline: receiving {message}"):
            work.wait()
        return buffer

    # --- sending ------------------------------------------------------------------------------

    def send(self, message: Message, tensor: Tensor) -> None:
        """Begin to send. Keeps the tensor's memory until it is sent."""
        assert tuple(tensor.shape) == self.hidden.shape, (tuple(tensor.shape), self.hidden.shape)
        assert tensor.dtype == self.hidden.dtype, (tensor.dtype, self.hidden.dtype)
        self._settle(message.channel)
        tensor = tensor.detach().contiguous()
        with communicating(f"pipeline: sending {message}"):
            work = self._begin(message.channel, tensor)
        self._sends[message.channel] = work, tensor, message

    def finish(self) -> None:
        """Wait for outstanding sends."""
        for channel in list(self._sends):
            self._settle(channel)
        assert not self._posted, f"posted and never taken: {[str(m) for m in self._posted]}"

    def _settle(self, channel: Channel) -> None:
        """Wait for the send before."""
        if channel not in self._sends:
            return
        work, _, message = self._sends.pop(channel)
        with communicating(f"pipeline: sending {message}"):
            work.wait()

    # --- channels -----------------------------------------------------------------------------

    def _begin(self, channel: Channel, tensor: Tensor) -> Work:
        """Start this rank's side of the next message of a channel."""
        _, source, target = channel
        number = self._counts[channel]
        self._counts[channel] += 1
        pair = self._pairs.get(channel)
        if pair is None:  # gloo, where a tag is what NCCL knows as a communicator
            group, tag = self._group, 2 * (number % TAGS) + (channel[0] == "B")
        else:
            group, tag = pair, 0
        if self.rank == source:
            work = dist.isend(tensor, self._global(target), group, tag)
        else:
            work = dist.irecv(tensor, self._global(source), group, tag)
        assert work is not None
        return work

    def greet(self) -> None:
        """Send a first message through each pair's group, one after another in an order that all
        ranks share: a communicator begins to exist when both ranks first use it, and each waits
        for the other then."""
        for channel in self._pairs:
            _, source, target = channel
            with communicating(f"pipeline: connecting pipeline ranks {source} and {target}"):
                self._begin(channel, torch.zeros(1, device=self.hidden.device)).wait()

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


def connect(
    groups: ProcessGroups,
    hidden: HiddenSpec,
    chunks: int = 1,
    timeout: timedelta | None = None,
) -> PipelineLinks | None:
    """The links of this rank; None where there is no pipeline. Every rank of the run calls it at
    the same time: backends number groups by the calls that make them.

    timeout: of a message; unset: the backend's default."""
    if groups.pp is None:
        return None
    pairs: dict[Channel, ProcessGroup] = {}
    if dist.get_backend(groups.pp) == "nccl":
        for pipeline in groups.dims.group_ranks("pp"):
            for channel in channels(len(pipeline), chunks):
                made = _make_pair(pipeline[channel[1]], pipeline[channel[2]], timeout)
                if groups.rank in (pipeline[channel[1]], pipeline[channel[2]]):
                    pairs[channel] = made
    links = PipelineLinks(groups.pp, hidden, pairs)
    links.greet()
    return links


def _make_pair(source: int, target: int, timeout: timedelta | None) -> ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True  # a message is short, and a whole rank waits for it
    if timeout is not None:
        options._timeout = timeout
    made: ProcessGroup = dist.new_group(
        [source, target], timeout=timeout, backend="nccl", pg_options=options, group_desc="p2p"
    )
    return made


def channels(pp: int, chunks: int) -> Iterator[Channel]:
    """All channels of a pipeline; the ring closes only where ranks have several chunks."""
    for rank in range(pp if chunks > 1 else pp - 1):
        yield "F", rank, (rank + 1) % pp
        yield "B", (rank + 1) % pp, rank
