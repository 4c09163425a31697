"""Writes a `torch_dist` checkpoint through `torch.distributed.checkpoint`, in one process without
process group, with one tensor in memory.

torch makes the plan, requests the pieces one by one and makes the index. trainyard's planner
describes the tensors (`plan`) without a state dict, and its writer writes the pieces to any store.
(torch's FileSystemWriter would keep a tensor of every key until its file is closed.) States of
random generators are not written: start Megatron-LM with --no-load-rng. Equal contents give equal
bytes."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from os import PathLike
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainyard.checkpoint.load import Checkpoint
from trainyard.checkpoint.reshard import OpenFile
from trainyard.checkpoint.safetensors.file import DTYPES, Sink
from trainyard.checkpoint.steps import TRACKER
from trainyard.conversion.megatron.experts import check_expert_ranks
from trainyard.conversion.megatron.folder import BACKEND, RELEASE, iteration_folder
from trainyard.conversion.megatron.lacking import refuse_for_megatron, warn_of_norm
from trainyard.conversion.megatron.model import WholeModel, whole_model
from trainyard.conversion.megatron.names import TransformerImpl
from trainyard.conversion.megatron.optimizer import has_optimizer
from trainyard.conversion.source import Source
from trainyard.conversion.torch_dist.common import COMMON
from trainyard.conversion.torch_dist.index import METADATA
from trainyard.conversion.torch_dist.plan import (
    TorchDistPlan,
    WrittenPiece,
    plan_torch_dist,
)
from trainyard.conversion.torch_save.write import LazyTensor, write_torch_file

BACKEND_DOCUMENT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

Advance = Callable[[int], object]


def write_torch_dist(
    source: Checkpoint | Source,
    open_file: OpenFile,
    *,
    num_files: int = 1,
    tp: int = 1,
    transformer_impl: TransformerImpl = "transformer_engine",
    distributed_optimizer: bool | None = None,
    ep: int | None = None,
    true_vocab_size: int | None = None,
    make_vocab_size_divisible_by: int | None = None,
    save_optimizer: bool = True,
    advance: Advance = lambda size_bytes: None,
    expect: Advance = lambda size_bytes: None,
) -> None:
    """Write a step, or a release if the source has no step; metadata.json after everything else in
    its folder, the tracker file last.

    open_file: starts a file by its name below the folder for Megatron-LM's --load.
    num_files: number of `.distcp` files. true_vocab_size: tokens of the tokenizer, to pad the
    vocabulary again for `tp` ranks (`tp` has no other effect). expect: called before the first file
    with the total bytes of tensors that `advance` will report. transformer_impl: layers that
    Megatron-LM will build, which name the norms of layers with experts differently.
    distributed_optimizer: layout of the optimizer's states; None: that of the run. ep:
    expert-parallel ranks of the run that loads it, which has a second optimizer for the experts if
    there are several; None: as many as the run of the source has.
    Raises ConfigError, before anything is written, for a model that Megatron-LM does not
    support."""
    model = whole_model(source, tp, true_vocab_size, make_vocab_size_divisible_by)
    refuse_for_megatron(model.config, pp=1)
    warn_of_norm(model.config)
    if distributed_optimizer is not None:
        options = {**model.options, "use_distributed_optimizer": distributed_optimizer}
        model = replace(model, options=options)
    if ep is None:
        ep = _expert_ranks(model)
    check_expert_ranks(model.config, ep)
    with_optimizer = save_optimizer and has_optimizer(model, by_name=True)
    plan = plan_torch_dist(model, with_optimizer, transformer_impl, ep)
    expect(plan.size_bytes)
    folder = iteration_folder(model.step)
    writer = _Writer(lambda name: open_file(f"{folder}/{name}"), num_files)
    _save(writer, _Planner(model, plan, advance))
    with open_file(f"{folder}/{COMMON}") as out:
        write_torch_file(out, plan.common, COMMON.removesuffix(".pt"))
    with open_file(f"{folder}/{BACKEND}") as out:
        out.write(json.dumps(BACKEND_DOCUMENT).encode())
    with open_file(TRACKER) as out:
        out.write((str(model.step) if model.step else RELEASE).encode())


def _expert_ranks(model: WholeModel) -> int:
    """Those that share the experts in the run of the source, as far as its options say."""
    found = model.options.get("expert_model_parallel_size")
    count = model.config.experts.num_experts
    if isinstance(found, int) and found > 0 and count is not None and count % found == 0:
        return found
    return 1


def _save(writer: _Writer, planner: _Planner) -> None:
    """Save with torch, and raise the original error, which torch wraps for its ranks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose
            save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as failed:
        cause, _ = next(iter(failed.failures.values()))
        raise cause from None


class _Planner(SavePlanner):
    """Describes and reads the tensors, piece by piece."""

    def __init__(self, model: WholeModel, plan: TorchDistPlan, advance: Advance) -> None:
        self._model, self._plan, self._advance = model, plan, advance
        self._pieces = {(piece.key, piece.offset): piece for piece in plan.pieces}

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing: there is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """All pieces and objects, as those of one rank."""
        objects = [WriteItem(MetadataIndex(n), WriteItemType.BYTE_IO) for n in self._plan.objects]
        return SavePlan([*map(_item, self._plan.pieces), *objects])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The index; Megatron core up to 0.15 requires `mcore_data` in it."""
        plans, metadata = create_default_global_save_plan(all_plans)
        metadata.mcore_data = {piece.key: {} for piece in self._plan.pieces}  # type: ignore[attr-defined]
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """A tensor, read now; or an object, for Megatron core a list of one for each name."""
        if write_item.type == WriteItemType.BYTE_IO:
            out = io.BytesIO()
            write_torch_file(out, [None], "archive")
            return out
        index = write_item.index
        assert index.offset is not None
        piece = self._pieces[index.fqn, tuple(index.offset)]
        self._advance(piece.spec.size_bytes)
        found = self._model.read_slice(piece.name, piece.source_offset, piece.spec.shape)
        return found.reshape(piece.shape)


def _item(piece: WrittenPiece) -> WriteItem:
    offset, shape = torch.Size(piece.offset), torch.Size(piece.shape)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offset, sizes=shape),
        properties=TensorProperties(dtype=DTYPES[piece.spec.dtype]),
        size=torch.Size(piece.global_shape),
    )
    return WriteItem(
        index=MetadataIndex(piece.key, offset), type=WriteItemType.SHARD, tensor_data=data
    )


class _Writer(StorageWriter):
    """Writes pieces in order into `__0_0.distcp`, `__0_1.distcp`, ..., then the index."""

    def __init__(self, open_file: OpenFile, num_files: int) -> None:
        self._open_file, self._num_files = open_file, num_files

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Nothing: no state is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: there is only one process."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans, unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write every piece; one is in memory at a time."""
        results = []
        for number, items in _shares(plan.items, self._num_files):
            name = f"__0_{number}.distcp"
            with self._open_file(name) as out:
                counted = _Counted(out)
                for item in items:
                    begin = counted.size
                    _write(counted, planner.resolve_data(item))
                    place = _StorageInfo(name, begin, counted.size - begin)
                    results.append(WriteResult(item.index, place.length, place))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index as torch's own class, which torch's reader requires."""
        places = {result.index: result.storage_data for found in results for result in found}
        index = replace(metadata, storage_data=places, version=CURRENT_DCP_VERSION)
        index.mcore_data = metadata.mcore_data  # type: ignore[attr-defined]
        with self._open_file(METADATA) as out:
            out.write(pickle.dumps(index, protocol=4))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """False: `open_file` decides where files go, so there is no id."""
        return False


class _Counted:
    """A sink that counts the bytes written."""

    def __init__(self, out: Sink) -> None:
        self._out, self.size = out, 0

    def write(self, data: Any, /) -> None:
        self._out.write(data)
        self.size += len(data)


def _write(out: Sink, data: torch.Tensor | io.BytesIO) -> None:
    if isinstance(data, io.BytesIO):
        out.write(data.getvalue())
    else:
        write_torch_file(out, LazyTensor.of(data), "archive")


def _shares(items: Sequence[WriteItem], num_files: int) -> Iterator[tuple[int, list[WriteItem]]]:
    """The items in their order, in at most `num_files` runs of about as many bytes."""
    ends, total = [], 0
    for item in items:
        total += _size(item)
        ends.append(total)
    limits = [total * (number + 1) / num_files for number in range(num_files - 1)]
    middles = [end - _size(item) / 2 for item, end in zip(items, ends, strict=True)]
    numbered = zip((bisect_right(limits, middle) for middle in middles), items, strict=True)
    for number, (_, some) in enumerate(groupby(numbered, key=lambda pair: pair[0])):
        yield number, [item for _, item in some]


def _size(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None or data.chunk is None:
        return 0
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize
