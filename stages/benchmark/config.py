"""Options of `python -m stages.benchmark`, under the names of Megatron-LM's inference test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import execution, location
from trainyard.errors import ConfigError
from trainyard.inference.config import SamplingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkConfig:
    """Generate text from a checkpoint with a KV cache, and measure the time."""

    load: str = location()
    """Checkpoint: a run's folder (its latest step) or the folder of one step."""
    prompts: tuple[str, ...] = ()
    """Texts to continue."""
    num_input_tokens: int | None = None
    """Length in tokens of random prompts, instead of --prompts."""
    num_tokens_to_generate: int = 30
    """Most tokens to generate for each prompt."""
    inference_max_requests: int = 8
    """Prompts in a batch; also the number of random prompts."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    ignore_eod: bool = False
    """Continue after the end of a document, so that every prompt gets the same number of tokens."""
    num_warmups: int = execution(1)
    """Untimed runs of the first batch for 10 tokens."""
    inference_repeat_n: int = execution(1)
    """Timed repetitions; all must yield the same tokens."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device; auto: a GPU if available."""
    output_dir: str | None = location(None)
    """Folder or URL for generations.json and timings.json; unset: print only."""

    def __post_init__(self) -> None:
        """Refuse anything but one kind of prompt, and counts out of range."""
        if bool(self.prompts) == (self.num_input_tokens is not None):
            given = "both were" if self.prompts else "neither was"
            raise ConfigError(
                "one of --prompts (texts) and --num-input-tokens (random prompts) is needed, and "
                f"{given} given"
            )
        names = ("num_input_tokens", "num_tokens_to_generate", "inference_max_requests")
        for name in (*names, "inference_repeat_n"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.num_warmups < 0:
            raise ConfigError(f"--num-warmups must be 0 or more, got {self.num_warmups}")
        if not all(self.prompts):
            raise ConfigError(
                "--prompts contains an empty text; every prompt needs at least a character"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint."""
        return {"load": (self.load,)}

    def output(self) -> Output | None:
        """The folder of the two documents."""
        return None if self.output_dir is None else Output.directory(self.output_dir)
