"""Options of `python -m stages.serve`, under the names of Megatron-LM's text generation servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import MAX_SIZE, check_at_least, check_at_most, execution, location
from trainyard.errors import ConfigError
from trainyard.inference.config import LayoutConfig
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.serving.config import DefaultsConfig, LimitConfig, ListenConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Serve text generation from a checkpoint over HTTP: Megatron-LM's PUT /api and OpenAI's
    /v1/completions and /v1/chat/completions; a page to try prompts is at /."""

    load: str = location()
    """Checkpoint: the folder of a run (its latest step), of one step, of Hugging Face, Meta or
    Megatron-LM."""
    served_model_name: str | None = execution(None)
    """Name of the model for clients; unset: the last part of --load."""
    listen: ListenConfig = field(default_factory=ListenConfig)
    defaults: DefaultsConfig = field(default_factory=DefaultsConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)
    engine: DynamicConfig = field(default_factory=DynamicConfig)
    inference_max_seq_length: int | None = execution(None)
    """Most tokens of a prompt with its output; unset: the positions of the model."""
    bf16: bool = execution(False)
    """Compute in bfloat16."""
    fp16: bool = execution(False)
    """Compute in float16. Neither of the two: in fp32."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    expect: tuple[str, ...] = execution(())
    """Options that the model of the checkpoint must have, as NAME=VALUE; a different model is
    refused. Model options on a command line of Megatron-LM are passed on here."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device; auto: a GPU if available."""

    def __post_init__(self) -> None:
        """Refuse counts out of range."""
        if self.bf16 and self.fp16:
            raise ConfigError("give --bf16 or --fp16, not both")
        check_at_least(self, 1, "inference_max_seq_length")
        check_at_most(self, MAX_SIZE, "inference_max_seq_length")
        if self.served_model_name is not None and not self.served_model_name.isprintable():
            raise ConfigError("--served-model-name has characters that cannot be printed")

    @property
    def nproc_per_node(self) -> int:
        """Ranks to start on this machine."""
        return self.layout.nproc_per_node

    def check_ranks(self, count: int | None) -> None:
        """Refuse more ranks than one copy of the model takes. count: None if unknown."""
        layout = self.layout
        needed = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
        if count is not None and count != needed:
            raise ConfigError(
                f"{count} ranks: --tensor-model-parallel-size "
                f"{layout.tensor_model_parallel_size} and --pipeline-model-parallel-size "
                f"{layout.pipeline_model_parallel_size} take {needed}; start that many, and "
                "another server for another copy of the model"
            )

    @property
    def model_name(self) -> str:
        """Of the model, for clients."""
        return self.served_model_name or self.load.rstrip("/").rpartition("/")[2] or "model"

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint."""
        return {"load": (self.load,)}

    def output(self) -> Output | None:
        """None: a server makes no artifact."""
        return None
