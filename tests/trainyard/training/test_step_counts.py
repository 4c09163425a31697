"""A training step waits for the device once, and runs as many kernels as when it was last timed.

Speed is measured on GPUs (`benchmarks/train.py`), which CI has not. This guard fails on what costs
it: a layer that no longer compiles whole, a loop that no longer fuses, an operator more between
compiled graphs, a number that the host asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainyard.models.small_gpt import LLAMA
from tests.trainyard.training.step_counts import StepCounts, count_step
from trainyard.datasets.config import DataConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.losses import Losses
from trainyard.models.mlp import MLP
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.precision import PrecisionConfig
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.training.loop import microbatch, step
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.options.training import TrainingConfig

ROOT = Path(__file__).resolve().parents[3]
LOCKED = next(
    line.removeprefix("torch==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.startswith("torch==")
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.__version__.split("+")[0] != LOCKED.split("+")[0],
        reason=f"other releases of torch fuse otherwise: pinned with the one of constraints.txt, "
        f"{LOCKED}",
    ),
]

KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA | {"untie_embeddings_and_output_weights": True},
}
ALLOWED_WAITS = {
    # The figures of a step, all at once; _root converts the norm among them, on the host.
    "trainyard/training/loop/step.py _forward_backward tolist": 1,
    "trainyard/optim/optimizer.py _root _local_scalar_dense": 1,
    # Of tensors that never leave the host: seeds and sample ids of two micro-batches.
    "trainyard/training/loop/microbatch.py seed_generators _local_scalar_dense": 2,
    "trainyard/training/loop/sample_check.py watch numpy": 2,
}
AROUND = {
    "trainyard/datasets/loader.py": 4,
    "trainyard/models/gpt/model.py": 2,
    "trainyard/models/model.py": 2,
    "trainyard/optim/optimizer.py": 3,
    "trainyard/optim/owned_params.py": 2,
    "trainyard/parallel/tensor/vocab.py": 2,
    "trainyard/training/loop/microbatch.py": 13,
    "trainyard/training/loop/step.py": 12,
}
"""Operators around the compiled layers, of both models."""
PINNED: dict[str, dict[str, Any]] = {
    "gpt": {
        "graph_breaks": {},
        "graphs": 4,
        "kernels": 152,
        "products": 82,
        "operators": AROUND
        | {
            "trainyard/models/embedding.py": 4,
            "trainyard/models/norms/own_backward.py": 2,
            "trainyard/optim/clip.py": 114,
            "trainyard/optim/rules.py": 9,
            "trainyard/parallel/data/accumulate.py": 56,
            "trainyard/parallel/pipeline/runner.py": 20,
        },
        "waits": ALLOWED_WAITS,
    },
    "llama": {
        "graph_breaks": {},
        "graphs": 4,
        "kernels": 152,
        "products": 82,
        "operators": AROUND
        | {
            "trainyard/models/norms/own_backward.py": 16,
            "trainyard/models/rope.py": 24,
            "trainyard/optim/clip.py": 62,
            "trainyard/optim/rules.py": 6,
            "trainyard/parallel/data/accumulate.py": 30,
            "trainyard/parallel/pipeline/runner.py": 46,
        },
        "waits": ALLOWED_WAITS,
    },
}
"""Of two layers and two micro-batches. Before you pin more, time the change on a GPU:
`python -m benchmarks.train gpt-1.3b llama-8b-half` beside the commit before it."""


def config_of(kind: str) -> PretrainConfig:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": 12}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return PretrainConfig(
        model=GPTConfig(**(sizes | dropout | KINDS[kind])),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=32),
        data=DataConfig(mock_data=True, num_workers=0),
        optimizer=OptimizerConfig(lr=1e-2),
        precision=PrecisionConfig(bf16=True),
        training=TrainingConfig(
            micro_batch_size=2,
            global_batch_size=4,
            train_iters=4,
            eval_iters=0,
            compile_layers="on",
            device="cpu",
        ),
    )


def differences(counts: StepCounts, pinned: dict[str, Any]) -> list[str]:
    """What differs from the pinned counts, a line each."""
    lines = []
    for name, found in counts.document().items():
        if not isinstance(found, dict):
            if found != pinned[name]:
                lines.append(f"{name}: {found}, pinned {pinned[name]}")
            continue
        for key in sorted({*found, *pinned[name]}):
            if found.get(key, 0) != pinned[name].get(key, 0):
                ours, theirs = found.get(key, 0), pinned[name].get(key, 0)
                lines.append(f"{name}: {key}: {ours}, pinned {theirs}")
    return lines


@pytest.mark.every_case
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_costs_what_it_did(kind: str) -> None:
    changed = differences(count_step(config_of(kind)), PINNED[kind])
    assert not changed, (
        f"a compiled step of {kind} has other costs than pinned:\n  "
        + "\n  ".join(changed)
        + f"\nIf this is meant and is no slower on a GPU, pin it in PINNED of {__file__}."
    )


def test_it_sees_a_number_that_the_host_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses_with_item(output: Tensor | Losses) -> Losses:
        losses = microbatch.losses_of(output)
        losses.of_tokens.sum().item()
        return losses

    monkeypatch.setattr(step, "losses_of", losses_with_item)
    changed = differences(count_step(config_of("gpt")), PINNED["gpt"])
    where = f"{Path(__file__).relative_to(ROOT)} losses_with_item _local_scalar_dense"
    assert f"waits: {where}: 2, pinned 0" in changed
    assert f"operators: {Path(__file__).relative_to(ROOT)}: 2, pinned 0" in changed  # the sums


def test_it_sees_a_layer_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MLP.forward

    def broken(self: MLP, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(MLP, "forward", broken)
    changed = differences(count_step(config_of("gpt")), PINNED["gpt"])
    assert [line.split(":")[0] for line in changed][:2] == ["graph_breaks", "graphs"]


def test_it_sees_a_kernel_more(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MLP.forward

    def scaled(self: MLP, x: Tensor) -> Tensor:
        return forward(self, x / x.abs().amax())

    monkeypatch.setattr(MLP, "forward", scaled)
    (changed,) = differences(count_step(config_of("gpt")), PINNED["gpt"])
    assert changed.startswith("kernels: ")
