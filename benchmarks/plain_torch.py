"""A plain torch training loop, the peer of `benchmarks.train`: no parallelism, no data loading.

    python -m benchmarks.plain_torch gpt-1.3b --steps 30

Layers compiled one by one, scaled dot-product attention, bf16 weights with fp32 master weights and
Adam moments, gradient clipping, random tokens that never leave the GPU. What a good engineer writes
in an afternoon, and therefore the least that a training stage must reach. Prints one JSON line."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.energy import joules
from benchmarks.shapes import SHAPES, Shape, share_of_peak


class Norm(nn.Module):
    """RMSNorm or LayerNorm."""

    def __init__(self, width: int, rms: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = None if rms else nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., h)."""
        if self.bias is None:
            return functional.rms_norm(x, self.weight.shape, self.weight, 1e-5)
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (b, s, n, d)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    """A transformer layer of either kind."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, bias = shape.hidden, not shape.llama
        self.shape = shape
        kv = shape.kv_heads * shape.head_dim
        self.norm1, self.norm2 = Norm(h, shape.llama), Norm(h, shape.llama)
        self.qkv = nn.Linear(h, h + 2 * kv, bias=bias)
        self.proj = nn.Linear(h, h, bias=bias)
        self.fc1 = nn.Linear(h, shape.ffn * (2 if shape.llama else 1), bias=bias)
        self.fc2 = nn.Linear(shape.ffn, h, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (b, s, h)."""
        b, s, h = x.shape
        n, g, d = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        q, k, v = self.qkv(self.norm1(x)).split([n * d, g * d, g * d], dim=-1)
        q, k, v = q.view(b, s, n, d), k.view(b, s, g, d), v.view(b, s, g, d)
        if self.shape.llama:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=n != g,
        )
        x = x + self.proj(out.transpose(1, 2).reshape(b, s, h))
        y = self.fc1(self.norm2(x))
        if self.shape.llama:
            gate, up = y.chunk(2, dim=-1)
            y = functional.silu(gate) * up
        else:
            y = functional.gelu(y, approximate="tanh")
        return x + self.fc2(y)


class Model(nn.Module):
    """Embedding, layers, norm, output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = None if shape.llama else nn.Embedding(shape.seq, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.llama)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if not shape.untied:
            self.output.weight = self.embedding.weight
        inverse = 500000.0 ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.seq).float(), inverse)
        angles = torch.cat((angles, angles), -1)[None, :, None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return head_loss(self.norm(x), self.output.weight, labels)


@torch.compile
def head_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over the vocabulary."""
    logits = functional.linear(x, weight).view(-1, weight.shape[0]).float()
    return functional.cross_entropy(logits, labels.reshape(-1))


def run(shape: Shape, steps: int, warmup: int, accumulate: int) -> dict[str, float | str]:
    """Median step time and what follows from it."""
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = Model(shape).bfloat16()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0.0, 0.02)
        elif name.endswith("bias"):  # what numbers are computed with shows in power, and so in time
            nn.init.zeros_(parameter)
    for layer in model.layers:
        layer.compile()
    weights = list(model.parameters())
    masters = [w.detach().float().requires_grad_() for w in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), fused=True)
    times, begin = [], math.nan
    for step in range(warmup + steps):
        torch.cuda.synchronize()
        if step == warmup:
            begin = joules()
        began = time.perf_counter()
        for _ in range(accumulate):
            tokens = torch.randint(0, shape.vocab, (shape.mbs, shape.seq + 1), device="cuda")
            (model(tokens[:, :-1], tokens[:, 1:]) / accumulate).backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad.float() if weight.grad is not None else None
            weight.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        torch.cuda.synchronize()
        if step >= warmup:
            times.append(time.perf_counter() - began)
    seconds = statistics.median(times)
    tokens = shape.mbs * accumulate * shape.seq
    rate = tokens / seconds
    return {
        "name": shape.name,
        "tokens_per_second": rate,
        "mfu": share_of_peak(shape, rate),
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
        "joules_per_token": (joules() - begin) / (tokens * steps),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()
    print(json.dumps(run(SHAPES[args.shape], args.steps, args.warmup, args.accumulate)))


if __name__ == "__main__":
    main()
