"""Options of `python -m stages.quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import MAX_RANKS, check_at_least, check_at_most, execution, location
from trainyard.errors import ConfigError
from trainyard.evaluation.config import EvaluationConfig

OVERLAPPING = 32
"""Tokens from one window to the next, as in stages.evaluate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """Write a checkpoint with weights in 8 bits, as a Hugging Face folder that vLLM, TensorRT-LLM
    and `transformers` load. Embeddings, norms and the output layer stay."""

    load_dir: str = location()
    """Checkpoint to read: a run folder (its latest step), a step folder, or the folder of another
    program. A Llama, Mistral, Qwen2 or Qwen3, or a model of the same parts."""
    save_dir: str = location()
    """Folder to write."""
    method: Literal["fp8", "int8"] = "fp8"
    """fp8: e4m3 weights, and inputs cast while the model runs. int8: weights alone."""
    strategy: Literal["channel", "tensor"] = "channel"
    """A scale for each output channel, or with fp8 for each matrix."""
    layout: Literal["compressed-tensors", "modelopt"] | None = None
    """compressed-tensors (unset: this): for vLLM and `transformers`, and with fp8 for TensorRT-LLM.
    modelopt: int8 for TensorRT-LLM."""
    num_shards: int = 1
    """Files of weights."""
    valid_data: str | None = location(None)
    """Text file: its perplexity before and after is measured, with weights in 8 bits and all else
    in fp32."""
    seq_length: int | None = None
    """Tokens of a window of --valid-data; unset: the sequence length of the training."""
    micro_batch_size: int = execution(4)
    """Windows of --valid-data at a time."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device for --valid-data; auto: a GPU if available."""

    def __post_init__(self) -> None:
        """Refuse counts out of range, and scales that no loader reads."""
        check_at_least(self, 1, "num_shards")
        check_at_most(self, MAX_RANKS, "num_shards")
        if self.method == "int8" and self.strategy != "channel":
            raise ConfigError(
                f"--strategy {self.strategy}: int8 weights have a scale for each output channel; "
                "give --strategy channel"
            )
        if self.method == "fp8" and self.layout == "modelopt":
            raise ConfigError(
                "--layout modelopt is of int8 weights, and --method is fp8; add --method int8, or "
                "leave --layout out: TensorRT-LLM reads fp8 weights as compressed-tensors"
            )
        self.evaluation()

    def evaluation(self) -> EvaluationConfig:
        """How --valid-data is scored: windows as stages.evaluate cuts them, or with --seq-length
        one after the other."""
        found = EvaluationConfig(
            task="WIKITEXT103",
            seq_length=self.seq_length,
            overlapping_eval=self.seq_length or OVERLAPPING,
            micro_batch_size=self.micro_batch_size,
        )
        return found if self.valid_data is None else found.for_files((self.valid_data,))

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint and the text."""
        text = self.valid_data
        return {"load": (self.load_dir,), "valid_data": () if text is None else (text,)}

    def output(self) -> Output:
        """The folder."""
        return Output.directory(self.save_dir)
