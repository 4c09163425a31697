"""Small models of every family, with random weights, for tests of `torch_dist`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from tests.trainyard.conversion.megatron import (
    test_bert,
    test_experts,
    test_latent,
    test_mamba,
    test_retro,
    test_t5,
)
from tests.trainyard.conversion.megatron.converted_runs import ROWS, save_weights
from tests.trainyard.models.perturbed import perturb
from trainyard.artifacts import store
from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.megatron.names import TransformerImpl
from trainyard.conversion.torch_dist.write import write_torch_dist
from trainyard.models.config import TransformerConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel
from trainyard.models.init import init_parameters
from trainyard.models.moe_config import MoEConfig
from trainyard.models.mtp_config import MTPConfig

Sample = tuple[TransformerConfig, dict[str, Tensor]]

EXPERTS = MoEConfig(num_experts=4, moe_ffn_hidden_size=24)
MIXTRAL = replace(test_experts.CONFIG, moe=EXPERTS)
PREDICTING = replace(MIXTRAL, moe=MoEConfig(), prediction=MTPConfig(mtp_num_layers=2))
LATENT = replace(test_latent.LATENT, prediction=MTPConfig())


def gpt(config: GPTConfig) -> Sample:
    """With biases of experts, which are no parameters."""
    model = GPTModel(config, ROWS)
    init_parameters(model, 3)
    perturb(model, seed=4, scale=1.0)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if name.endswith("expert_bias"):
            tensor.copy_(tensor.new_tensor(range(len(tensor))) / 8)
    return config, state


FAMILIES: dict[str, Callable[[], Sample]] = {
    "experts": partial(gpt, MIXTRAL),
    "experts-grouped": partial(
        gpt,
        replace(MIXTRAL, disable_bias_linear=False, moe=replace(EXPERTS, moe_grouped_gemm=True)),
    ),
    "experts-local": partial(gpt, MIXTRAL),
    "experts-in-some-layers": partial(gpt, test_experts.CONFIG),
    "llama-4": partial(gpt, test_experts.LLAMA4),
    "gpt-oss": partial(gpt, test_latent.CONFIGS["gpt-oss"]),
    "latent": partial(gpt, LATENT),
    "latent-queries-of-tokens": partial(gpt, test_latent.CONFIGS["queries of tokens"]),
    "prediction": partial(gpt, PREDICTING),
    "deepseek": partial(gpt, test_latent.CONFIGS["deepseek"]),
    "bert": test_bert.weights,
    "bert-without-binary-head": partial(test_bert.weights, bert_binary_head=False),
    "t5": test_t5.weights,
    "t5-relative": partial(test_t5.weights, **(test_t5.RELATIVE | {"softmax_scale": None})),
    "retro": partial(test_retro.weights, **test_retro.WITHOUT_NORM),
    "retro-llama": partial(test_retro.weights, **test_retro.WITHOUT_NORM, **test_retro.LLAMA),
    "retro-local": partial(test_retro.weights, **test_retro.WITHOUT_NORM),
    "hybrid": partial(test_mamba.weights, **test_mamba.KINDS["hybrid"]),
    "mamba": partial(test_mamba.weights, **test_mamba.KINDS["mamba alone"]),
    "hybrid-without-mamba": partial(test_mamba.weights, **test_mamba.KINDS["no mamba"]),
    "hybrid-experts": partial(test_mamba.weights, **test_mamba.KINDS["experts"]),
}
"""By what is special of each in a checkpoint."""


def impl_of(kind: str) -> TransformerImpl:
    """The layers that Megatron-LM is to build."""
    return "local" if kind.endswith("-local") else "transformer_engine"


def written(folder: Path, sample: Sample, **options: object) -> Path:
    """The files of a model, from a checkpoint of ours: the folder for --load."""
    save_weights(folder / "run", *sample)
    made = folder / "made"
    with open_checkpoint(str(folder / "run")) as checkpoint:
        write_torch_dist(
            checkpoint,
            lambda name: store.open_output(str(made / name), name),
            **options,  # type: ignore[arg-type]
        )
    return made
