"""Opens a `torch_dist` checkpoint of Megatron core as a source, from any number of ranks.

Reads the optimizer if its states are stored like the model, or if the parameters can be identified
in the buffers of its ranks (`buckets`).

    latest_checkpointed_iteration.txt     a number, or `release`
    iter_0000100/ or release/
        metadata.json                     {"sharded_backend": "torch_dist", ...}, written last
        common.pt                         args, iteration, schedules (`common`)
        .metadata                         the index of the tensors (`index`)
        __0_0.distcp, __0_1.distcp, ...   tensors (`tensors`)

All of these are pickles, which only `torch_save.pickles` reads."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.bounds import check_model
from trainyard.checkpoint.closing import Closing
from trainyard.checkpoint.safetensors.file import DTYPE_NAMES
from trainyard.checkpoint.safetensors.header import TensorSpec
from trainyard.conversion.documents import read_document
from trainyard.conversion.megatron.args import config_of
from trainyard.conversion.megatron.folder import BACKEND, find_iteration
from trainyard.conversion.megatron.inferred import FACTS
from trainyard.conversion.megatron.names import family_in
from trainyard.conversion.megatron.optimizer import HALF, MAIN, MOMENTS, Unknown
from trainyard.conversion.megatron.optimizer import num_updates as updates_of
from trainyard.conversion.megatron.progress import (
    Scaler,
    check_iteration,
    iteration_in,
    samples_in,
    scaler_in,
    schedule_in,
    tokens_of,
    warn_without,
)
from trainyard.conversion.source import model_shapes, refuse_differences
from trainyard.conversion.torch_dist.buckets import (
    Joined,
    Stacked,
    check_places,
    states_in_buckets,
    updates_and_scaler,
)
from trainyard.conversion.torch_dist.common import COMMON, Common
from trainyard.conversion.torch_dist.index import (
    METADATA,
    StoredIndex,
    StoredTensor,
    read_index,
)
from trainyard.conversion.torch_dist.names import Named, Source, name_tensors
from trainyard.conversion.torch_dist.tensors import StoredTensors
from trainyard.conversion.torch_save.file import TORCH_DTYPES
from trainyard.errors import ArtifactError
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.checkpoint_names import EMBEDDING, EXPERT_BIAS

log = logging.getLogger(__name__)

GATHERED = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..+\.param_state/shard_\d+_\d+")
"""An object with all states of one rank of the model, of the kind dp_zero_gather_scatter."""

REMEDY = {
    "dp_reshardable": "save it again there with --dist-ckpt-optim-fully-reshardable",
    "fully_sharded_bucket_space": "save it again there with --dist-ckpt-optim-fully-reshardable",
    "dp_zero_gather_scatter": "save it again there with --dist-ckpt-optim-fully-reshardable, or "
    "with --ckpt-fully-parallel-save before Megatron core 0.14",
}
"""What to do if the parameters in buffers of ranks cannot be identified, by
`distrib_optim_sharding_type`."""


class TorchDistSource(Closing):
    """A `Source`. Use it as a context manager, or `close` it after reading."""

    def __init__(self, url: str, given: Mapping[str, Any]) -> None:
        self.url, self.step = find_iteration(url)
        has_common_file = _check_backend(self.url)
        index = read_index(join(self.url, METADATA))
        self._stored = index.tensors
        _check_files(self.url, index.ends)
        with Common(self.url, has_common_file, index) as common:
            tree, where = common.tree, common.url
            options = {key: value for key, value in given.items() if value is not None}
            self.family = family_in(index.tensors)
            args = {**common.args, **options}
            named = self._named(index, tied=not args.get("untie_embeddings_and_output_weights"))
            self.args = {**args, **self._facts(named)}
            check_iteration(self.step, iteration_in(tree, where), where)
            self.config: TransformerConfig = config_of(self.args, where)
            self._updates = updates_of(common.optimizer, common.read, self.step)
            self._scaler = scaler_in(common.optimizer, common.read, where)
        self.consumed_train_samples = samples_in(self.args, where)
        self.scheduler = schedule_in(tree, where)
        """State of the schedules, as in the file, or None."""
        self._common = where
        self._sources: dict[str, Source] = {
            name: source for name, source in named.sources.items() if name.startswith("model.")
        }
        self.specs: dict[str, TensorSpec] = {name: self._spec(name) for name in self._sources}
        self.padded_vocab_size = self._vocabulary()
        self.vocab_size = tokens_of(self.args, self.padded_vocab_size)
        self._check_model(named)
        self.num_updates = 0
        self._joined: dict[str, Joined | Stacked] = {}
        """States in buffers, by the name of the parameter."""
        self._add_optimizer(named, tree, index)
        self.scaler: Scaler = self._scaler if self.num_updates else {}
        """State of the loss scale; empty without the optimizer, or if it is constant or unknown."""
        if self.num_updates:
            dtype = self.specs[f"model.{EMBEDDING}"].dtype
            warn_without(self.scaler, dtype, self.args, self.url)
        if not self._joined:
            self._tensors = self._opened()
        log.info(
            "opened torch_dist checkpoint step=%d tensors=%d objects=%d pickles read %s url=%s",
            *(self.step, len(self.specs), len(index.objects), index.network, self.url),
        )

    # --- the model ------------------------------------------------------------------------

    def _named(self, index: StoredIndex, *, tied: bool) -> Named:
        shapes = {key: tensor.logical_shape for key, tensor in index.tensors.items()}
        try:
            return name_tensors(shapes, tied=tied, family=self.family)
        except ValueError as error:
            raise ArtifactError(f"{self.url}: {error}") from error

    def _facts(self, named: Named) -> dict[str, Any]:
        """Arguments that follow from the tensors."""
        shapes = {
            name.removeprefix("model."): self._spec(name, source).shape
            for name, source in named.sources.items()
            if name.startswith("model.")
        }
        return FACTS[self.family](shapes)

    def _spec(self, name: str, source: Source | None = None) -> TensorSpec:
        """Type and shape of one of our tensors. Raises ArtifactError if its parts do not fit."""
        source = source or self._sources[name]
        parts = [self._stored[key] for key in source.keys]
        skipped = 0 if source.layer is None else 1
        shapes = [part.logical_shape[skipped:] for part in parts]
        alike = {(part.dtype, shape[1:]) for part, shape in zip(parts, shapes, strict=True)}
        if len(parts) > 1 and (len(alike) > 1 or not all(shapes)):
            raise ArtifactError(f"{self.url}: {', '.join(source.keys)} do not fit together")
        dtype = DTYPE_NAMES[TORCH_DTYPES[parts[0].dtype]]
        if len(parts) == 1:
            return TensorSpec(dtype, shapes[0])
        return TensorSpec(dtype, (sum(shape[0] for shape in shapes), *shapes[0][1:]))

    def _vocabulary(self) -> int:
        found = self.specs.get(f"model.{EMBEDDING}")
        if found is None or len(found.shape) != 2:
            raise ArtifactError(f"{self.url}: has no embedding ({EMBEDDING})")
        return found.shape[0]

    def _check_model(self, named: Named) -> None:
        found = {name.removeprefix("model."): spec.shape for name, spec in self.specs.items()}
        found |= dict.fromkeys(named.unknown, ())
        check_model(self.config, self.padded_vocab_size, len(found), self._common)
        wanted = model_shapes(self.config, self.padded_vocab_size)
        refuse_differences(found, wanted, self.url, "the model of its args")

    # --- the optimizer --------------------------------------------------------------------

    def _add_optimizer(self, named: Named, tree: Mapping[str, Any], index: StoredIndex) -> None:
        """Add its states, if their parameters can be identified; otherwise log why not."""
        states = {n: s for n, s in named.sources.items() if n.startswith("optimizer.")}
        gathered = [name for name in index.objects if GATHERED.fullmatch(name)]
        keys = named.in_buffers or tuple(gathered)
        if self.step == 0 or not (states or keys):
            return
        try:
            specs = self._states(states) if states else self._in_buckets(keys, tree, index)
        except Unknown as reason:
            log.warning("the optimizer of %s is left out: %s", self.url, reason)
            return
        self._sources |= {name: states[name] for name in specs if states}
        self.specs |= specs
        self.num_updates = self._updates

    def _kinds(self) -> tuple[str, ...]:
        """Kinds of states to read; fp32 weights need no fp32 copies."""
        keys = (key for source in self._sources.values() for key in source.keys)
        is_half = any(_is_half(self._stored[key]) for key in keys)
        return (*MOMENTS, MAIN) if is_half else MOMENTS

    def _trained(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters; the bias of a router's choice is none."""
        names = (name.removeprefix("model.") for name in self._sources)
        return {n: self.specs[f"model.{n}"].shape for n in names if not n.endswith(EXPERT_BIAS)}

    def _states(self, states: Mapping[str, Source]) -> dict[str, TensorSpec]:
        names = list(self._trained())
        specs = {}
        for kind in self._kinds():
            for name in names:
                full = f"optimizer.{kind}.{name}"
                if full not in states:
                    raise Unknown(f"it has no {kind} of {name}")
                specs[full] = spec = self._spec(full, states[full])
                if spec.shape != self.specs[f"model.{name}"].shape or spec.dtype != "F32":
                    raise Unknown(f"its {kind} of {name} is {spec.dtype} {list(spec.shape)}")
        strange = {n.split(".", 2)[2] for n in states} - set(names)
        if strange:
            raise Unknown(f"it has states of {min(strange)}, which is not a weight of the model")
        return specs

    def _in_buckets(
        self, keys: Sequence[str], tree: Mapping[str, Any], index: StoredIndex
    ) -> dict[str, TensorSpec]:
        shapes = self._trained()
        try:
            if self.family not in ("gpt", "bert"):
                raise Unknown("the order of parameters in them is known only for GPT and BERT")
            found = states_in_buckets(self._stored, keys, shapes, self.config, self.args)
            found_state = updates_and_scaler(self.url, index.objects, keys, self.step)
            self._updates, self._scaler = found_state
            self._tensors = self._opened(keys)
            try:
                check_places(found, self._tensors, lambda name: self.read(f"model.{name}"))
            except BaseException:
                self._tensors.close()
                raise
        except Unknown as reason:
            raise Unknown(_why_in_buffers(keys, tree, reason)) from reason
        self._joined = found
        return {
            f"optimizer.{kind}.{name}": TensorSpec("F32", shape)
            for kind in self._kinds()
            for name, shape in shapes.items()
        }

    def _opened(self, more: Iterable[str] = ()) -> StoredTensors:
        used = {key for source in self._sources.values() for key in source.keys} | set(more)
        return StoredTensors(self.url, {key: self._stored[key] for key in sorted(used)})

    # --- tensors --------------------------------------------------------------------------

    def read(self, name: str) -> Tensor:
        """A copy of a whole tensor, on the CPU, contiguous."""
        if name not in self._sources:
            _, kind, parameter = name.split(".", 2)
            return self._joined[parameter].read(self._tensors, kind)
        source = self._sources[name]
        parts = [self._read(key, source.layer) for key in source.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, key: str, layer: int | None) -> Tensor:
        """A stored tensor, or one layer of it."""
        shape = self._stored[key].logical_shape
        if layer is None:
            return self._tensors.read(key, (0,) * len(shape), shape)
        return self._tensors.read(key, (layer, *(0 for _ in shape[1:])), (1, *shape[1:]))[0]

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """Empty: Megatron-LM keeps the tokenizer elsewhere."""
        return {}

    def close(self) -> None:
        """Close the files; tensors read before stay valid."""
        self._tensors.close()


def open_torch_dist(url: str, **given: Any) -> TorchDistSource:
    """The checkpoint at a root with latest_checkpointed_iteration.txt, or at iter_XXXXXXX/ or
    release/ in it.

    given: arguments of Megatron-LM, by their names with underscores; they replace the files'.
    Raises ArtifactError for damaged or hostile files, ConfigError for a model that ours does not
    compute."""
    return TorchDistSource(url, given)


def _check_backend(url: str) -> bool:
    """Refuse a folder of another kind, or an unfinished save, which has no metadata.json yet.

    Returns whether it has a common.pt."""
    names = store.list_folder(url)
    if BACKEND not in names:
        raise ArtifactError(
            f"{url}: has no {BACKEND}, which is written last, so the save did not finish (or it is "
            "in torch's own format, torch_dcp, which trainyard cannot read)"
        )
    document = read_document(join(url, BACKEND))
    backend = document.get("sharded_backend") if isinstance(document, dict) else None
    if backend != "torch_dist":
        raise ArtifactError(
            f"{url}: {BACKEND} says sharded_backend {backend!r:.40}, wanted 'torch_dist'"
        )
    if METADATA not in names:
        raise ArtifactError(f"{url}: has no {METADATA}; the checkpoint is incomplete")
    return COMMON in names


def _why_in_buffers(keys: Sequence[str], tree: Mapping[str, Any], reason: Unknown) -> str:
    content = tree.get("content_metadata")
    kind = content.get("distrib_optim_sharding_type") if isinstance(content, Mapping) else None
    kind_text = f"of the kind {kind}" if kind else f"as in {keys[0]}"
    remedy = REMEDY.get(str(kind), REMEDY["dp_reshardable"])
    return (
        f"its states, {kind_text}, are stored as buffers of its ranks, and their parameters cannot "
        f"be identified: {reason}; {remedy}"
    )


def _is_half(stored: StoredTensor) -> bool:
    return stored.dtype in HALF


def _check_files(url: str, ends: Mapping[str, int]) -> None:
    """Refuse a truncated file, even if only an object after its last tensor is missing."""
    sizes = store.list_folder(url)
    for name, end in sorted(ends.items()):
        if sizes.get(name, end) < end:  # opening a missing file is an error anyway
            raise ArtifactError(
                f"{join(url, name)}: has {sizes[name]} bytes, but by {METADATA} its items end at "
                f"{end}; it is truncated"
            )
