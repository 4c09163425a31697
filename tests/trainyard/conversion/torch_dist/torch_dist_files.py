"""`torch_dist` checkpoints for tests, written by torch's own distributed checkpoint from tensors
with the names and shapes of the format.

Written from a description of the format, and without any module of ours that reads or writes it."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from tests.trainyard.conversion.megatron.megatron_files import Layout as RankLayout
from tests.trainyard.conversion.megatron.megatron_files import (
    arguments,
    megatron_modules,
    stand_in_module,
)
from tests.trainyard.conversion.megatron.megatron_states import Whole
from trainyard.models.gpt.config import GPTConfig

ENGINE = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}

Pieces = list[tuple[tuple[int, ...], Tensor]]
"""(offset, values)."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the files are to look."""

    tp: int = 1
    """Ranks that the tensors of a layer were cut over."""
    stacked: bool = True
    """Whether layers stand in one tensor."""
    flat: int = 0
    """Data-parallel ranks over which states are cut as flat vectors; 0: they are whole."""
    main: str = "fp32_param"
    """What the fp32 parameters are called."""
    prefix: str = ""
    """chained_0., as of releases before 0.14."""
    own_class: bool = True
    """Whether the index is of Megatron core's class."""
    step: int = 100
    common: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] | None = field(default_factory=dict)


@dataclass
class Stored:
    """A tensor to be written."""

    shape: tuple[int, ...]
    pieces: Pieces
    unflattened: tuple[int, ...] | None = None

    def whole(self) -> Tensor:
        """Put together."""
        out = torch.empty(self.shape, dtype=self.pieces[0][1].dtype)
        for offset, values in self.pieces:
            box = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            out[box] = values
        return out


# --- names and cuts -------------------------------------------------------------------------------


def key_of(name: str, stacked: bool) -> tuple[str, int | None]:
    """The key of one of our names, and the layer where there is an axis of layers."""
    if not name.startswith("decoder.layers."):
        return name, None
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    for ours, theirs in ENGINE.items():
        if rest.startswith(ours):
            rest = theirs + rest.removeprefix(ours)
    return (
        (f"decoder.layers.{rest}", int(number))
        if stacked
        else (
            f"decoder.layers.{number}.{rest}",
            None,
        )
    )


def cuts_of(name: str, config: GPTConfig, tp: int) -> tuple[int, int]:
    """(dim, parts) of a tensor of one layer."""
    if name.endswith(("word_embeddings.weight", "output_layer.weight")) or ".linear_qkv." in name:
        return 0, tp
    if ".linear_fc1." in name:
        return 0, 2 * tp if config.swiglu else tp
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return 1, tp
    return 0, 1


def stored_of(
    tensors: Whole, config: GPTConfig, layout: Layout, prefix: str = "", flat: int = 0
) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        key, layer = key_of(name, layout.stacked)
        dim, parts = cuts_of(name, config, layout.tp)
        shape: tuple[int, ...] = tuple(tensor.shape)
        boxes = [
            (tuple(i * (shape[d] // parts) if d == dim else 0 for d in range(len(shape))), part)
            for i, part in enumerate(tensor.chunk(parts, dim=dim))
        ]
        grid = tuple(parts if d == dim else 1 for d in range(len(shape)))
        if layer is not None:
            boxes = [((layer, *offset), part[None]) for offset, part in boxes]
            shape, grid = (config.num_layers, *shape), (config.num_layers, *grid)
        full = prefix + key
        if not flat:
            found.setdefault(full, Stored(shape, [])).pieces.extend(boxes)
            continue
        size = boxes[0][1].numel()
        vectors = found.setdefault(full, Stored((*grid, size), [], shape))
        for offset, part in boxes:
            cell = tuple(o * g // n for o, g, n in zip(offset, grid, shape, strict=True))
            begin = 0
            for piece in part.reshape(-1).tensor_split(flat):
                values = piece.reshape(*(1 for _ in cell), -1).contiguous()
                vectors.pieces.append(((*cell, begin), values))
                begin += len(piece)
    return found


# --- writing --------------------------------------------------------------------------------------


class Planner(SavePlanner):
    """Pieces of tensors, and pickled objects, as a rank of Megatron's would bring them."""

    def __init__(self, stored: Mapping[str, Stored], objects: Mapping[str, Any], own: bool) -> None:
        self.stored, self.objects, self.own = stored, objects, own

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                MetadataIndex(key, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offset), values.shape),
                    TensorProperties.create_from_tensor(values),
                    torch.Size(tensor.shape),
                ),
            )
            for key, tensor in self.stored.items()
            for offset, values in tensor.pieces
        ]
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.objects]
        return SavePlan(items + objects)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        if self.own:
            metadata = sys.modules[CLASS_MODULE].MCoreMetadata(**vars(metadata))
            metadata.mcore_data = {
                key: {"nd_reformulated_orig_global_shape": torch.Size(t.unflattened)}
                if t.unflattened
                else {}
                for key, t in self.stored.items()
            }
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            out = io.BytesIO()
            torch.save([self.objects[index.fqn]], out)
            return out
        assert index.offset is not None
        held = dict(self.stored[index.fqn].pieces)
        return held[tuple(index.offset)].contiguous()


CLASS_MODULE = "megatron.core.dist_checkpointing.strategies.torch"


@contextmanager
def megatron_metadata() -> Iterator[None]:
    """Megatron core's class of the index, that is only there while it is pickled."""
    made = dataclasses.make_dataclass(
        "MCoreMetadata", [("mcore_data", Any, None)], bases=(Metadata,)
    )
    made.__module__ = CLASS_MODULE
    with stand_in_module(CLASS_MODULE) as module:
        module.MCoreMetadata = made  # type: ignore[attr-defined]
        yield


OBJECTS: dict[str, Any] = {
    "decoder.layers.mlp.linear_fc1._extra_state/shard_0_4": io.BytesIO(b"scales"),
    "rng_state/shard_0.0_1.1": [{"torch_rng_state": torch.arange(16, dtype=torch.uint8)}],
}


def quietly_save(folder: Path, planner: SavePlanner | None = None, **tensors: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(folder, sync_files=False)
        dcp.save(tensors, storage_writer=writer, planner=planner, no_dist=True)


def write_around(root: Path, config: GPTConfig, layout: Layout, vocab: int) -> Path:
    """Everything but the tensors; returns the folder of the iteration."""
    folder = root / f"iter_{layout.step:07d}"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text(str(layout.step))
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps({**backend, "common_backend": "torch"}))
    common: dict[str, Any] = {"iteration": layout.step, "checkpoint_version": 3.0, **layout.common}
    with megatron_modules() as enum:
        if layout.args is not None:
            rank_layout = RankLayout(tp=layout.tp, step=layout.step, args=layout.args)
            common["args"] = arguments(config, rank_layout, vocab)
            common["args"].attention_backend = enum.flash  # type: ignore[attr-defined]
        torch.save(common, folder / "common.pt")
    return folder


COMMON_OBJECT = "common_state/shard_0_1"


def common_in_an_object(root: Path, held: Any = None) -> Path:
    """What common.pt holds, or something else, as core 0.19 and later keeps it."""
    (folder,) = root.glob("iter_*")
    with megatron_modules(), megatron_metadata():
        common = torch.load(folder / "common.pt", weights_only=False)
        torch.save([common] if held is None else held, folder / "__7_0.distcp")
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.state_dict_metadata[COMMON_OBJECT] = BytesStorageMetadata()
        length = (folder / "__7_0.distcp").stat().st_size
        place = _StorageInfo("__7_0.distcp", 0, length)
        metadata.storage_data[MetadataIndex(COMMON_OBJECT)] = place
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "common.pt").unlink()
    return root


def write(
    root: Path,
    whole: Whole,
    config: GPTConfig,
    layout: Layout,
    states: Mapping[str, Whole] | None = None,
) -> Path:
    """A checkpoint below `root`. states: exp_avg, exp_avg_sq, param by our names."""
    vocab = whole["embedding.word_embeddings.weight"].shape[0]
    folder = write_around(root, config, layout, vocab)
    stored = stored_of(whole, config, layout)
    for kind, tensors in (states or {}).items():
        theirs = layout.main if kind == "param" else kind
        prefix = f"{layout.prefix}optimizer.state.{theirs}."
        stored |= stored_of(tensors, config, layout, prefix, layout.flat)
    with megatron_metadata():
        quietly_save(folder, Planner(stored, OBJECTS, layout.own_class))
    return root
