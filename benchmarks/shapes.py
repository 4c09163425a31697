"""The models whose training is timed, and what a token of each costs.

FLOPs: 3 x (2 x parameters of every matrix product + causal attention, half of s^2) a token, the
output layer counted, recomputation not. Of a Mamba-2 layer, 7 for each number of its state beside
the products, as Megatron-LM counts; in chunks there are more. A hybrid has layers of one kind each:
M Mamba-2, * attention, - MLP."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, its batch and sequence."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    mbs: int
    llama: bool = False
    """RMSNorm, rotary positions, SwiGLU, no biases; otherwise GPT-2's way."""
    untied: bool = False
    experts: int = 0
    """In place of each MLP, of the width `ffn`; 0: none."""
    topk: int = 2
    state: int = 0
    """Mamba-2 layers of so many numbers a channel, in heads of 64 channels; 0: none."""
    groups: int = 1
    """Groups of heads of a Mamba-2 layer that share what is written to the state and read."""
    pattern: str = ""
    """The letter of each layer of a model with a state; empty: all are Mamba-2."""

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads

    def flags(self) -> list[str]:
        """The model as flags of `stages.pretrain`."""
        flags = {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "num-attention-heads": self.heads,
            "ffn-hidden-size": self.ffn,
            "seq-length": self.seq,
            "micro-batch-size": self.mbs,
            "hidden-dropout": 0.0,
            "attention-dropout": 0.0,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        if self.kv_heads != self.heads:
            words += ["--group-query-attention", "--num-query-groups", str(self.kv_heads)]
        if self.state:
            words += ["--position-embedding-type", "none"]
        elif self.llama:
            words += ["--position-embedding-type", "rope", "--rotary-base", "500000"]
        if self.llama or self.state:
            words += ["--normalization", "RMSNorm"]
        if self.llama:
            words += ["--swiglu", "--disable-bias-linear"]
        if self.state:
            words += ["--model-type", "mamba", "--mamba-state-dim", str(self.state)]
            words += ["--mamba-num-groups", str(self.groups), "--is-hybrid-model"]
        if self.pattern:
            words += ["--hybrid-layer-pattern", self.pattern]
        if self.experts:
            words += ["--num-experts", str(self.experts), "--moe-router-topk", str(self.topk)]
            words += ["--moe-aux-loss-coeff", "0.01", "--moe-grouped-gemm"]
            words += ["--moe-token-dispatcher-type", "alltoall"]
        if self.untied:
            words.append("--untie-embeddings-and-output-weights")
        return words


PEAK = 989e12
"""bf16 operations a second of an H100 or H200 by the data sheet, without sparsity."""
MAMBA_HEAD = 64
"""Channels of a head of a Mamba-2 layer, the default of --mamba-head-dim."""


def flops_per_token(shape: Shape) -> float:
    """Operations of forward and backward."""
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    visited = shape.topk if shape.experts else 1
    inner = 2 * h
    projected = 2 * inner + 2 * shape.groups * shape.state + inner // MAMBA_HEAD
    of_layer = {
        "M": 2 * h * (projected + inner) + 7 * inner * shape.state,
        # Two products of 2 s h each, half of it causal.
        "*": 2 * (h * (h + 2 * kv) + h * h) + 2 * shape.seq * h,
        "-": 2 * visited * (3 if shape.llama else 2) * h * shape.ffn,
    }
    block = "M" if shape.state else "*-"
    pattern = shape.pattern or shape.layers * block
    return 3 * (sum(map(of_layer.__getitem__, pattern)) + 2.0 * h * shape.vocab)


def share_of_peak(shape: Shape, tokens_per_second: float) -> float:
    """MFU of one GPU."""
    return tokens_per_second * flops_per_token(shape) / PEAK


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gpt-345m", 24, 1024, 16, 16, 4096, 50304, 1024, 32),
        Shape("gpt-1.3b", 24, 2048, 16, 16, 8192, 131072, 4096, 4),
        Shape("llama-8b-half", 16, 4096, 32, 8, 14336, 128256, 4096, 2, llama=True, untied=True),
        Shape("llama-8b-32k", 16, 4096, 32, 8, 14336, 128256, 32768, 1, llama=True, untied=True),
        Shape(
            *("mixtral-2l", 2, 4096, 32, 8, 14336, 32000, 4096, 4),
            llama=True,
            untied=True,
            experts=8,
        ),
        Shape("gpt-125m", 12, 768, 12, 12, 3072, 50304, 2048, 16),
        Shape("mamba-130m", 24, 768, 12, 12, 3072, 50304, 2048, 16, state=128),
        # Half of the hybrid of arXiv:2406.07887: kinds of layers in its shares, in the widths of
        # llama-8b-half, whose size it has.
        Shape(
            *("hybrid-8b-half", 26, 4096, 32, 8, 14336, 128256, 4096, 2),
            llama=True,
            untied=True,
            state=128,
            groups=8,
            pattern="M-M-M--M*-M-M-M-M-M*-M-M--",
        ),
        Shape("tiny", 2, 128, 4, 4, 512, 1024, 128, 2),
    )
}
