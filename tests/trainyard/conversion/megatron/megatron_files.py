"""Checkpoints of Megatron-LM for tests, cut from a whole model by the rules of the format.

Written from a description of the format, with loops over heads and ranks, and without any module of
ours that reads or writes it."""

from __future__ import annotations

import enum
import io
import random
import signal
import sys
import types
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.trainyard.conversion.megatron.megatron_states import Whole, add_optimizer
from trainyard.models.gpt.config import GPTConfig

BOTH = ("weight", "bias")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the files are to look."""

    spelling: str = "core"
    """core, engine (core with Transformer Engine's layer), legacy, legacy-engine, oldest (2019)."""
    version: float | None = 3.0
    """None: the file does not say, which means 0."""
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    release: bool = False
    step: int = 100
    args: dict[str, Any] | None = field(default_factory=dict)
    """More arguments; None: the file has none."""
    optimizer: str | None = None
    """plain, distributed."""
    scaler: dict[str, Any] | None = None
    """What the optimizer keeps of the scale of the loss; None, as in bf16, where there is none."""
    new_zip: bool = True
    extra_state: bool = True
    """Keep what Transformer Engine keeps beside the weights."""


# --- cutting ----------------------------------------------------------------------------------


def heads_of(tensor: Tensor, config: GPTConfig) -> list[tuple[list[Tensor], Tensor, Tensor]]:
    """(queries, key, value) of each group, from rows that are grouped as in the whole model."""
    d = config.head_dim
    per_group = config.num_attention_heads // config.query_groups
    blocks = list(tensor.split(d, dim=0))
    groups = []
    for group in range(config.query_groups):
        own = blocks[group * (per_group + 2) : (group + 1) * (per_group + 2)]
        groups.append((own[:per_group], own[per_group], own[per_group + 1]))
    return groups


def qkv_of_rank(tensor: Tensor, config: GPTConfig, version: float, rank: int, tp: int) -> Tensor:
    groups = heads_of(tensor, config)
    own = groups[rank * len(groups) // tp : (rank + 1) * len(groups) // tp]
    if version >= 2:
        return torch.cat([torch.cat([*queries, key, value]) for queries, key, value in own])
    assert not config.group_query_attention
    if version == 0:
        kinds = zip(*((queries[0], key, value) for queries, key, value in own), strict=True)
        return torch.cat([torch.cat(kind) for kind in kinds])
    rows = []
    for queries, key, value in own:
        for channel in range(config.head_dim):
            rows += [queries[0][channel], key[channel], value[channel]]
    return torch.stack(rows)


def part_of_rank(
    name: str, tensor: Tensor, config: GPTConfig, version: float, rank: int, tp: int
) -> Tensor:
    """What tensor rank `rank` holds of a parameter."""
    if ".linear_qkv." in name:
        return qkv_of_rank(tensor, config, version, rank, tp)
    if ".linear_fc1." in name:
        halves = tensor.chunk(2) if config.swiglu else [tensor]
        return torch.cat([half.chunk(tp)[rank] for half in halves])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(tp, dim=1)[rank].contiguous()
    if name.endswith(("word_embeddings.weight", "output_layer.weight")):
        return tensor.chunk(tp)[rank].clone()
    return tensor.clone()


# --- names, in the order of the modules -------------------------------------------------------


def layer_names(spelling: str) -> list[tuple[str, str]]:
    """(theirs, ours) of the parameters of a layer."""
    tables = {
        "core": [
            ("input_layernorm.", "input_layernorm."),
            ("self_attention.linear_proj.", "self_attention.linear_proj."),
            ("self_attention.linear_qkv.", "self_attention.linear_qkv."),
            ("self_attention.q_layernorm.", "self_attention.q_layernorm."),
            ("self_attention.k_layernorm.", "self_attention.k_layernorm."),
            ("pre_mlp_layernorm.", "pre_mlp_layernorm."),
            ("mlp.linear_fc1.", "mlp.linear_fc1."),
            ("mlp.linear_fc2.", "mlp.linear_fc2."),
        ],
        "engine": [
            ("self_attention.linear_proj.", "self_attention.linear_proj."),
            ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
            ("self_attention.linear_qkv.", "self_attention.linear_qkv."),
            ("self_attention.q_layernorm.", "self_attention.q_layernorm."),
            ("self_attention.k_layernorm.", "self_attention.k_layernorm."),
            ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
            ("mlp.linear_fc1.", "mlp.linear_fc1."),
            ("mlp.linear_fc2.", "mlp.linear_fc2."),
        ],
        "legacy": [
            ("input_norm.", "input_layernorm."),
            ("self_attention.query_key_value.", "self_attention.linear_qkv."),
            ("self_attention.dense.", "self_attention.linear_proj."),
            ("post_attention_norm.", "pre_mlp_layernorm."),
            ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
            ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
        ],
        "legacy-engine": [
            ("self_attention.layernorm_qkv.layer_norm_", "input_layernorm."),
            ("self_attention.layernorm_qkv.", "self_attention.linear_qkv."),
            ("self_attention.proj.", "self_attention.linear_proj."),
            ("layernorm_mlp.layer_norm_", "pre_mlp_layernorm."),
            ("layernorm_mlp.fc1_", "mlp.linear_fc1."),
            ("layernorm_mlp.fc2_", "mlp.linear_fc2."),
        ],
        "oldest": [
            ("input_layernorm.", "input_layernorm."),
            ("attention.query_key_value.", "self_attention.linear_qkv."),
            ("attention.dense.", "self_attention.linear_proj."),
            ("post_attention_layernorm.", "pre_mlp_layernorm."),
            ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
            ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
        ],
    }
    return [(f"{t}{end}", f"{o}{end}") for t, o in tables[spelling] for end in BOTH]


def chunk_items(
    whole: Whole, config: GPTConfig, layout: Layout, pp_rank: int, chunk: int
) -> Iterator[tuple[list[str], str]]:
    """(keys from the model dict down, our name in the whole model) of a stage's parameters."""
    is_core = layout.spelling in ("core", "engine")
    size = config.num_layers // (layout.pp * layout.vpp)
    begin = chunk * (config.num_layers // layout.vpp) + pp_rank * size
    first = (pp_rank, chunk) == (0, 0)
    last = (pp_rank, chunk) == (layout.pp - 1, layout.vpp - 1)
    root = [] if is_core else ["language_model"]
    if first:
        for kind in ("word", "position"):
            ours = f"embedding.{kind}_embeddings.weight"
            nested = [*root, "embedding", f"{kind}_embeddings", "weight"]
            if ours in whole:
                yield ([ours] if is_core else nested), ours
    encoder = "transformer" if layout.spelling == "oldest" else "encoder"
    for local in range(size):
        for theirs, ours in layer_names(layout.spelling):
            full = f"decoder.layers.{begin + local}.{ours}"
            if full in whole:
                key = f"layers.{local}.{theirs}"
                yield ([f"decoder.{key}"] if is_core else [*root, encoder, key]), full
    if last:
        for end in BOTH:
            ours = f"decoder.final_layernorm.{end}"
            final = "final_layernorm" if layout.spelling == "oldest" else "final_norm"
            if ours in whole:
                yield ([ours] if is_core else [*root, encoder, f"{final}.{end}"]), ours
        if "output_layer.weight" in whole:
            ours = "output_layer.weight"
            yield ([ours] if is_core else [*root, "output_layer", "weight"]), ours
        elif layout.pp > 1:
            key = ["output_layer.weight"] if is_core else ["word_embeddings_for_head", "weight"]
            yield key, "embedding.word_embeddings.weight"


# --- files ------------------------------------------------------------------------------------


def arguments(config: GPTConfig, layout: Layout, vocab: int) -> Namespace:
    """As Megatron-LM's parser leaves them; of thousands, those that matter and some that do not."""
    values = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": config.head_dim,
        "group_query_attention": config.group_query_attention,
        "num_query_groups": config.num_query_groups,
        "seq_length": config.seq_length,
        "max_position_embeddings": config.positions,
        "position_embedding_type": config.position_embedding_type,
        "add_position_embedding": True,
        "rotary_base": int(config.rotary_base),
        "rotary_percent": config.rotary_percent,
        "normalization": config.normalization,
        "norm_epsilon": config.norm_epsilon,
        "swiglu": config.swiglu,
        "qk_layernorm": config.qk_layernorm,
        "add_bias_linear": not config.disable_bias_linear,
        "add_qkv_bias": config.add_qkv_bias,
        "bias_gelu_fusion": config.bias_gelu_fusion,
        "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "make_vocab_size_divisible_by": 128,
        "padded_vocab_size": vocab,
        "vocab_size": None,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "num_experts": None,
        "consumed_train_samples": 6400,
        "params_dtype": torch.bfloat16,
        "iteration": layout.step,
        "exit_signal": signal.SIGTERM,
        "save": Path("/somewhere/else"),
        "data_path": ["0.5", "a", "0.5", "b"],
        "world_size": layout.tp * layout.pp * 4,
    }
    return Namespace(**{**values, **(layout.args or {})})


@contextmanager
def stand_in_module(name: str) -> Iterator[types.ModuleType]:
    """A module, and its parents, that can be imported only in this context."""
    parts = name.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    before = {part: sys.modules.get(part) for part in names}
    sys.modules.update({part: types.ModuleType(part) for part in names})
    try:
        yield sys.modules[name]
    finally:
        for part, module in before.items():
            if module is None:
                del sys.modules[part]
            else:
                sys.modules[part] = module


@contextmanager
def megatron_modules() -> Iterator[type[enum.Enum]]:
    """An enum of a module of Megatron's, that is only there while it is pickled."""
    name = "megatron.core.transformer.enums"
    members = {"flash": 1, "fused": 2, "auto": 5}
    backend: Any = enum.Enum("AttnBackend", members, module=name)
    with stand_in_module(name) as module:
        module.AttnBackend = backend  # type: ignore[attr-defined]
        yield backend


def write(
    root: Path,
    whole: Whole,
    config: GPTConfig,
    layout: Layout,
    states: Mapping[str, Whole] | None = None,
) -> Path:
    """A checkpoint below `root`. states: exp_avg, exp_avg_sq, param by our names, for the
    optimizer."""
    step = "release" if layout.release else f"iter_{layout.step:07d}"
    root.mkdir(parents=True, exist_ok=True)
    tracker = "release" if layout.release else str(layout.step)
    (root / "latest_checkpointed_iteration.txt").write_text(tracker)
    vocab = whole["embedding.word_embeddings.weight"].shape[0]
    for pp_rank in range(layout.pp):
        for tp_rank in range(layout.tp):
            name = f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if layout.pp > 1 else "")
            folder = root / step / name
            folder.mkdir(parents=True)
            _write_rank(folder, whole, config, layout, states, vocab, pp_rank, tp_rank)
    return root


def _write_rank(
    folder: Path,
    whole: Whole,
    config: GPTConfig,
    layout: Layout,
    states: Mapping[str, Whole] | None,
    vocab: int,
    pp_rank: int,
    tp_rank: int,
) -> None:
    version = layout.version or 0.0

    def cut(source: Whole, name: str) -> Tensor:
        return part_of_rank(name, source[name], config, version, tp_rank, layout.tp)

    tree: dict[str, Any] = {"iteration": layout.step}
    if layout.version is not None:
        tree["checkpoint_version"] = layout.version
    chunks = []
    for chunk in range(layout.vpp):
        items = list(chunk_items(whole, config, layout, pp_rank, chunk))
        chunks.append(items)
        model = _nested([(keys, cut(whole, ours)) for keys, ours in items])
        if layout.spelling == "engine" and layout.extra_state:
            model["decoder.layers.0.mlp.linear_fc1._extra_state"] = io.BytesIO(b"scales")
            model["decoder.layers.0.self_attention.core_attention._extra_state"] = torch.empty(
                0, dtype=torch.uint8
            )
        tree["model" if layout.vpp == 1 else f"model{chunk}"] = model
    if layout.optimizer is not None:
        assert states is not None
        is_distributed = layout.optimizer == "distributed"
        vectors = add_optimizer(tree, chunks, states, cut, is_distributed)
        if layout.scaler is not None:
            tree["optimizer"]["grad_scaler"] = layout.scaler
        if vectors is not None:
            torch.save(vectors, folder / "distrib_optim.pt")
    tree["rng_state"] = [
        {
            "random_rng_state": random.Random(1).getstate(),
            "np_rng_state": np.random.RandomState(1).get_state(),
            "torch_rng_state": torch.arange(24, dtype=torch.uint8),
            "rng_tracker_states": {"model-parallel-rng": torch.arange(16, dtype=torch.uint8)},
        }
    ]
    with megatron_modules() as backend:
        if layout.args is not None:
            args = arguments(config, layout, vocab)
            args.attention_backend = backend.flash  # type: ignore[attr-defined]
            tree["args"] = args
        torch.save(
            tree,
            folder / "model_optim_rng.pt",
            _use_new_zipfile_serialization=layout.new_zip,
        )


def _nested(items: list[tuple[list[str], Tensor]]) -> dict[str, Any]:
    tree: dict[str, Any] = OrderedDict()
    for keys, tensor in items:
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, OrderedDict())
        node[keys[-1]] = tensor
    return tree
