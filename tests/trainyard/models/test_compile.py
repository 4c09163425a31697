"""A compiler takes a layer whole, once for all layers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from tests.trainyard.models import small_gpt
from tests.trainyard.models.small_gpt import VOCAB
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.models.mamba.config import MambaConfig
from trainyard.models.mamba.model import MambaModel
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.testing.pool import RankPool

pytestmark = pytest.mark.slow

SMALL = small_gpt.SMALL | {"hidden_dropout": 0.1, "attention_dropout": 0.0}
LLAMA = small_gpt.LLAMA | {"qk_layernorm": True}
SELECTIVE = {"recompute_granularity": "selective"}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "window": LLAMA | {"window_size": "5,0"},
    "fp32 residual": {"fp32_residual_connection": True, "apply_layernorm_1p": True},
    "core": LLAMA | SELECTIVE,
    "modules": LLAMA | SELECTIVE | {"recompute_modules": ("mlp", "layernorm", "core_attn")},
    "full": LLAMA | {"recompute_granularity": "full", "recompute_num_layers": 2},
    "offload": LLAMA | {"cpu_offloading_num_layers": 2},
}


def step(model: GPTModel) -> list[torch.Tensor]:
    tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    losses = model.loss(tokens, tokens.roll(-1, 1), dropout_seed=torch.tensor(11))
    losses.mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [losses.detach(), *gradients]


def check_layers(kind: str, parallel: ModelParallel = ALONE) -> None:
    config = GPTConfig(**(SMALL | KINDS[kind]))
    plain, compiled = GPTModel(config, VOCAB, parallel), GPTModel(config, VOCAB, parallel)
    init_parameters(plain, 3)
    init_parameters(compiled, 3)
    counter = CompileCounterWithBackend("aot_eager" if kind == "modules" else "eager")
    for layer in compiled.decoder.layers.values():
        layer.compile(fullgraph=True, backend=counter)
    for ours, theirs in zip(step(compiled), step(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert counter.frame_count == 1


HYBRID: dict[str, Any] = {
    **{"model_type": "mamba", "num_layers": 4, "hybrid_layer_pattern": "MM*-"},
    **{"mamba_state_dim": 4, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_chunk_size": 4},
}


def test_each_kind_of_layer_of_a_hybrid_compiles_whole_and_once() -> None:
    torch._dynamo.reset()
    config = MambaConfig(**SMALL | HYBRID)
    plain, compiled = MambaModel(config, VOCAB), MambaModel(config, VOCAB)
    counter = CompileCounterWithBackend("aot_eager")
    for model in (plain, compiled):
        init_parameters(model, 3)
    for layer in compiled.decoder.layers.values():
        layer.compile(fullgraph=True, backend=counter)
    for ours, theirs in zip(step(compiled), step(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert counter.frame_count == 3


RARER = ("window", "fp32 residual", "core")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.full] * (kind in RARER)) for kind in KINDS],
)
def test_layers_compile_whole_and_once(kind: str) -> None:
    torch._dynamo.reset()
    check_layers(kind)


def check_cut_layers(sp: bool) -> None:
    check_layers("modules", ModelParallel(dist.group.WORLD, sequence_parallel=sp))


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("sp", [False, True])
def test_cut_layers_compile_whole_and_once(ranks: RankPool, sp: bool) -> None:
    ranks.run(check_cut_layers, 2, sp)


def test_models_import_neither_the_compiler_nor_fully_sharded_data_parallelism() -> None:
    """Each takes a second, for which every stage with a model would wait."""
    program = "import sys, trainyard.models.families, trainyard.training.pretrain"
    program += "; print({'torch._dynamo', 'torch.distributed.fsdp'} & sys.modules.keys())"
    done = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert done.strip() == "set()"
