"""Options of `python -m stages.parity`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import (
    MAX_SIZE,
    check_above_zero,
    check_at_least,
    check_at_most,
    execution,
    location,
)
from trainyard.errors import ConfigError
from trainyard.inference.config import LayoutConfig

TOLERANCES = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.25}
"""Largest difference of log-probabilities in nats, by what is computed in: a few units in the last
place of the largest logits (10 to 20), or in fp32 of the sums behind them."""
MAX_PROMPT, MAX_NEW = 64, 16
"""Tokens of the longest random prompt and of an output, unless given, for a model that has room."""
MAX_PROMPTS = 100_000
"""Random prompts that are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityConfig:
    """Compare the log-probabilities of the training's forward with those of the static and the
    dynamic engine, and fail (exit status 1) if they differ by more than a tolerance."""

    load: str = location()
    """Checkpoint: the folder of a run (its latest step), of one step, of Hugging Face, Meta or
    Megatron-LM; a GPT or Retro."""
    prompts: tuple[str, ...] = ()
    """Texts to continue; unset: random tokens."""
    num_prompts: int = 4
    """Random prompts, of evenly spread lengths."""
    num_input_tokens: int | None = None
    """Tokens of the longest random prompt; unset: 64, or half of the model's positions."""
    num_tokens_to_generate: int | None = None
    """New tokens of each prompt; unset: 16, or half of the model's positions."""
    tolerance: float | None = None
    """Largest difference of a token's log-probability, in nats; unset: 0.001 in fp32, 0.05 in fp16,
    0.25 in bf16."""
    seed: int = 1234
    """Of random prompts."""
    bf16: bool = False
    """Compute in bfloat16."""
    fp16: bool = False
    """Compute in float16. Neither of the two: in fp32."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    expect: tuple[str, ...] = execution(())
    """Options that the model of the checkpoint must have, as NAME=VALUE; with others it is
    refused."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device; auto: a GPU if available."""
    output_dir: str | None = location(None)
    """Folder or URL for parity.json; unset: print only."""

    def __post_init__(self) -> None:
        """Refuse counts out of range."""
        if self.bf16 and self.fp16:
            raise ConfigError("give --bf16 or --fp16, not both")
        check_at_least(self, 1, "num_prompts", "num_input_tokens", "num_tokens_to_generate")
        check_at_most(self, MAX_PROMPTS, "num_prompts")
        check_at_most(self, MAX_SIZE, "num_input_tokens", "num_tokens_to_generate")
        if self.tolerance is not None:
            check_above_zero(self, "tolerance")
        if self.prompts and self.num_input_tokens is not None:
            raise ConfigError(
                "--prompts are texts, and --num-input-tokens is of random prompts; give one"
            )
        if not all(self.prompts):
            raise ConfigError(
                "--prompts contains an empty text; every prompt needs at least a character"
            )

    @property
    def precision(self) -> str:
        """What is computed in."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def allowed(self) -> float:
        """The largest difference."""
        return TOLERANCES[self.precision] if self.tolerance is None else self.tolerance

    @property
    def nproc_per_node(self) -> int:
        """Ranks to start on this machine."""
        return self.layout.nproc_per_node

    def check_ranks(self, count: int | None) -> None:
        """Refuse another number of ranks than one copy of the model takes. count: None if
        unknown."""
        needed = self.layout.parallel().model_ranks
        if count is not None and count != needed:
            raise ConfigError(
                f"{count} ranks: --tensor-model-parallel-size x --pipeline-model-parallel-size is "
                f"{needed}, one copy of the model; make them equal (--nproc-per-node)"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint."""
        return {"load": (self.load,)}

    def output(self) -> Output | None:
        """The folder of parity.json."""
        return None if self.output_dir is None else Output.directory(self.output_dir)
