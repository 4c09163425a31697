"""The first values of a model's parameters.

Each tensor is drawn whole, in fp32 on the CPU, from a generator made of the seed and its name. The
values therefore do not depend on the order of drawing, the device, or how the tensor will be cut
later."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from trainyard.models.config import GPTConfig
from trainyard.models.gpt import GPTModel

OUTPUT_PROJECTIONS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")


def init_parameters(model: GPTModel, seed: int) -> None:
    """Fill every parameter of `model`, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw_parameter(name, parameter.shape, model.config, seed))


def draw_parameter(name: str, shape: torch.Size, config: GPTConfig, seed: int) -> Tensor:
    """The whole first value of the parameter called `name`, fp32 on the CPU.

    Weights are N(0, std), those that add to the residual stream N(0, std / sqrt(2 L)); biases are 0
    and norms 1."""
    if name.endswith(".bias"):
        return torch.zeros(shape, device="cpu", dtype=torch.float32)
    if name.endswith("layernorm.weight"):
        return torch.ones(shape, device="cpu", dtype=torch.float32)
    values = torch.empty(shape, device="cpu", dtype=torch.float32)
    return nn.init.normal_(
        values, 0.0, weight_std(name, config), generator=named_generator(name, seed)
    )


def weight_std(name: str, config: GPTConfig) -> float:
    """Standard deviation of the weight called `name`."""
    if name.endswith(OUTPUT_PROJECTIONS):
        return config.init_method_std / math.sqrt(2.0 * config.num_layers)
    return config.init_method_std


def named_generator(name: str, seed: int) -> torch.Generator:
    """A CPU generator that depends on seed and name alone."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device="cpu")
    generator.manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))
    return generator
