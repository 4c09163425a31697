"""What all replicas of a model need from a checkpoint: finds it, divides it among them, and sends
each part to the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainyard.parallel.comm_errors import communicating

Wanted: TypeAlias = tuple[str, Sequence[int], torch.Tensor]
"""A tensor's name, the offset of a box of it, and the memory that the box fills."""

EXCHANGED_BYTES = 64 << 20
"""Maximum that a rank sends or receives in a round; more if many ranks would make reads small."""


def device_of(group: ProcessGroup) -> torch.device:
    """The device of the messages of a group."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def common_boxes(wanted: Sequence[Wanted], copies: ProcessGroup) -> list[bool]:
    """For each box, whether all ranks of a group want it at the same place of their lists, in
    memory of the same type. A message takes 8 bytes for each box."""
    marks = torch.tensor([len(wanted), *map(_mark, wanted)], dtype=torch.int64)
    with communicating("load: comparing boxes"):
        counts = _least_and_most(marks[:1], copies)
        if counts[0].item() != counts[1].item():
            return [False] * len(wanted)
        least, most = _least_and_most(marks[1:], copies)
    return (least == most).tolist()


def _mark(box: Wanted) -> int:
    name, offset, memory = box
    return _number(f"{name} {list(offset)} {list(memory.shape)} {memory.dtype}")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _least_and_most(marks: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for operation in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        reduced = marks.to(device_of(group), copy=True)
        dist.all_reduce(reduced, operation, group=group)
        found.append(reduced.cpu())
    return found[0], found[1]


def divide(boxes: Sequence[Wanted], num_parts: int) -> list[list[Wanted]]:
    """Boxes in parts, by the name of the tensor: the ranks of a replica, which may need boxes of
    the same rows, then have them in the same part. Some parts may be empty."""
    parts: list[list[Wanted]] = [[] for _ in range(num_parts)]
    for box in boxes:
        parts[_number(box[0]) % num_parts].append(box)
    return parts


def send_boxes(memories: Sequence[torch.Tensor], source: int, copies: ProcessGroup) -> None:
    """Send the contents of memory on one rank of a group to the same memory on the others.

    source: rank in the group."""
    is_source = dist.get_rank(copies) == source
    for batch in _batches(memories):
        message = torch.empty(
            sum(piece.nbytes for piece in batch), dtype=torch.uint8, device=device_of(copies)
        )
        begin = 0
        places = []
        for piece in batch:
            places.append(message[begin : begin + piece.nbytes])
            begin += piece.nbytes
        if is_source:
            for piece, place in zip(batch, places, strict=True):
                place.copy_(_bytes_of(piece))
        dist.broadcast(message, group=copies, group_src=source)
        if not is_source:
            for piece, place in zip(batch, places, strict=True):
                values = place.to(piece.device, copy=True).view(piece.dtype)
                piece.copy_(values.view(piece.shape))


def _bytes_of(piece: torch.Tensor) -> torch.Tensor:
    return piece.contiguous().reshape(-1).view(torch.uint8)


def _batches(memories: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Pieces of memory whose bytes make a message."""
    batch: list[torch.Tensor] = []
    size = 0
    for piece in (piece for memory in memories for piece in _pieces(memory.detach())):
        if batch and size + piece.nbytes > EXCHANGED_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.nbytes
    if batch:
        yield batch


def _pieces(memory: torch.Tensor) -> Iterator[torch.Tensor]:
    """Memory in parts that fit a message; one that is not contiguous stays whole."""
    if memory.is_contiguous():
        yield from memory.reshape(-1).split(max(1, EXCHANGED_BYTES // memory.element_size()))
    else:
        yield memory
