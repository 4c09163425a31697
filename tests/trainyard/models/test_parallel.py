"""Models cut over ranks or stages against one process: losses and every gradient."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.trainyard.models import small_gpt
from tests.trainyard.models.small_gpt import VOCAB, model_parallel
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.models.pipeline_stage import WHOLE, PipelineStage
from trainyard.models.tied import EMBEDDING, is_copy
from trainyard.parallel.context.split import cut_sequence
from trainyard.parallel.model import ALONE, ModelParallel
from trainyard.parallel.sharding import has_partial_grad, shard_of
from trainyard.testing.pool import RankPool
from trainyard.testing.tolerances import FP32_SUM_ORDER

SMALL = small_gpt.SMALL | {
    "num_layers": 3,
    "num_attention_heads": 8,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.0,
    "init_method_std": 0.1,
}
LLAMA = small_gpt.LLAMA | {"untie_embeddings_and_output_weights": True, "num_query_groups": 4}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "qwen": LLAMA | {"qk_layernorm": True, "add_qkv_bias": True, "softmax_type": "learnable"},
    "mistral": LLAMA
    | {
        "window_size": "5,0",
        "untie_embeddings_and_output_weights": False,
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "layernorm", "mlp"),
    },
    "full": LLAMA | {"recompute_granularity": "full", "fp32_residual_connection": True},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def some_batch(parallel: ModelParallel = ALONE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, VOCAB, (2, 16), generator=generator)
    sequences = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    cut = {k: cut_sequence(v, 1, parallel.cp_size, parallel.cp_rank) for k, v in sequences.items()}
    return cut | {"dropout_seed": torch.tensor(77)}


def build(
    kind: str,
    parallel: ModelParallel = ALONE,
    pipeline_stage: PipelineStage = WHOLE,
    **changes: Any,
) -> GPTModel:
    model = GPTModel(GPTConfig(**(SMALL | KINDS[kind] | changes)), VOCAB, parallel, pipeline_stage)
    init_parameters(model, 5)
    return model


def losses_of(stages: list[GPTModel], batch: dict[str, Tensor]) -> Tensor:
    """Forward through a chain of stages."""
    out: Tensor | None = None
    for model in stages:
        out = model.forward_step(out, batch)
    assert out is not None
    return out


def gradients(models: list[GPTModel]) -> dict[str, Tensor]:
    """Whole gradients by name; those of a copy are added to the original's."""
    found: dict[str, Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            original = EMBEDDING if is_copy(parameter) else name
            found[original] = found.get(original, 0) + parameter.grad
    return found


def check_cut_model(kind: str, tp: int, cp: int, sp: bool, boundaries: list[int]) -> None:
    reference = build(kind)
    expected = losses_of([reference], some_batch())
    expected.mean().backward()
    # keys that go round know no window
    parallel = model_parallel(tp, cp, sp, "allgather" if kind == "mistral" else "p2p")
    stages = [build(kind, parallel, stage) for stage in stages_of(boundaries)]
    losses = losses_of(stages, some_batch(parallel))
    whole = cut_sequence(expected.detach(), 1, cp, parallel.cp_rank)
    torch.testing.assert_close(losses.detach(), whole, **FP32_SUM_ORDER)
    (losses.sum() / expected.numel()).backward()
    for model in stages:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            for group, needed in (
                (parallel.tp, has_partial_grad(parameter)),
                (parallel.cp, True),
            ):
                if group is not None and needed:
                    dist.all_reduce(parameter.grad, group=group)
    wholes = gradients([reference])
    shards = {n: shard_of(p) for model in stages for n, p in model.named_parameters()}
    for name, gradient in gradients(stages).items():
        shard = shards[name]
        mine = wholes[name] if shard is None else shard.take(wholes[name])
        torch.testing.assert_close(gradient, mine, **FP32_SUM_ORDER, msg=lambda m, n=name: n + m)


def stages_of(boundaries: list[int]) -> list[PipelineStage]:
    """[0, 1, 3] is two stages of one and two layers."""
    last = len(boundaries) - 2
    return [
        PipelineStage(range(a, b), has_embedding=i == 0, has_output=i == last)
        for i, (a, b) in enumerate(pairwise(boundaries))
    ]


@pytest.mark.slow
@pytest.mark.distributed
@every_kind
@pytest.mark.parametrize(
    ("tp", "cp", "sp"),
    [(2, 1, False), (2, 1, True), (4, 1, False), (4, 1, True), (1, 2, False), (2, 2, True)],
    ids=["tp2", "tp2 sp", "tp4", "tp4 sp", "cp2", "tp2 cp2 sp"],
)
def test_cut_models_equal_one_process(
    ranks: RankPool, kind: str, tp: int, cp: int, sp: bool
) -> None:
    ranks.run(check_cut_model, tp * cp, kind, tp, cp, sp, [0, 3])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("sp", [False, True])
@every_kind
def test_stages_of_cut_models_equal_one_process(ranks: RankPool, kind: str, sp: bool) -> None:
    ranks.run(check_cut_model, 2, kind, 2, 1, sp, [0, 1, 2, 3])


@pytest.mark.few_cases(3)
@every_kind
@pytest.mark.parametrize("boundaries", [[0, 1, 3], [0, 0, 1, 2, 3, 3]])
def test_chained_stages_are_the_whole_bit_by_bit(kind: str, boundaries: list[int]) -> None:
    whole, stages = build(kind), [build(kind, pipeline_stage=s) for s in stages_of(boundaries)]
    expected, measured = losses_of([whole], some_batch()), losses_of(stages, some_batch())
    assert torch.equal(measured, expected)
    expected.mean().backward()
    measured.mean().backward()
    wholes = gradients([whole])
    found = gradients(stages)
    assert found.keys() == wholes.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, wholes[name]), name


def check_inference(tp: int) -> None:
    model = build("llama", model_parallel(tp, 1, False, "p2p")).eval()
    reference = build("llama").eval()
    tokens = some_batch()["tokens"]
    torch.testing.assert_close(model(tokens), reference(tokens), **FP32_SUM_ORDER)


@pytest.mark.slow
@pytest.mark.distributed
def test_logits_of_a_cut_model_are_whole(ranks: RankPool) -> None:
    ranks.run(check_inference, 2, 2)
