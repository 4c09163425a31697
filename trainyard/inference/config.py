"""Options of sampling, under the names of Megatron-LM's generation programs. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Temperature, then top-k or top-p; top-k 1 or temperature 0 is greedy."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int = 1
    """Choose among this many likeliest tokens; 1 is greedy, 0 is all."""
    top_p: float = 0.0
    """Choose among the likeliest tokens that together reach this probability; 0 is all."""
    seed: int = 1234
    """Seed of the random numbers; each prompt has its own sequence."""

    def __post_init__(self) -> None:
        """Refuse values out of range, and top-k together with top-p."""
        if not 0.0 <= self.temperature <= 100.0:
            raise ConfigError(f"--temperature must be in [0, 100], got {self.temperature}")
        if self.top_k < 0:
            raise ConfigError(f"--top-k must be 0 (all) or more, got {self.top_k}")
        if not 0.0 <= self.top_p <= 1.0:
            raise ConfigError(f"--top-p must be in [0, 1], got {self.top_p}")
        if self.top_k > 0 and self.top_p > 0.0:
            raise ConfigError(
                f"--top-k {self.top_k} and --top-p {self.top_p} exclude each other; "
                "set one of them to 0 (--top-k is 1 unless given)"
            )
        if self.seed < 0:
            raise ConfigError(f"--seed must be 0 or more, got {self.seed}")

    @property
    def greedy(self) -> bool:
        """Whether no random number is used."""
        return self.top_k == 1 or self.temperature == 0.0


def check_length(
    what: str,
    length: int,
    max_new_tokens: int,
    positions: int,
    option: str = "--num-tokens-to-generate",
) -> None:
    """Refuse a prompt, `what` in the message, that exceeds the model's positions with its new
    tokens. option: the one that asks for those."""
    total = length + max_new_tokens
    if total > positions:
        raise ConfigError(
            f"{what} and {option} {max_new_tokens} make {total}, and the model has "
            f"{positions} positions; shorten one"
        )


GREEDY = SamplingConfig()
