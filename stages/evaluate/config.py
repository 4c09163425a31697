"""Options of `python -m stages.evaluate`, under the names of Megatron-LM's tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import execution, location
from trainyard.evaluation.config import EvaluationConfig
from trainyard.models.gpt.config import GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Evaluate a checkpoint on a text, by the definitions of Megatron-LM's task of this name."""

    load: str = location()
    """Checkpoint: a run's folder (its latest step) or the folder of one step."""
    valid_data: str = location()
    """Text file to evaluate on, a path or URL."""
    evaluation: EvaluationConfig
    expect: tuple[str, ...] = execution(())
    """Options that the model of the checkpoint must have, as NAME=VALUE; with others it is refused.
    The options of a model on Megatron-LM's command line come here."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device; auto: a GPU if available."""
    output_dir: str | None = location(None)
    """Folder or URL for results.json; unset: print only."""

    def __post_init__(self) -> None:
        """Choose the detokenizer by the file name, so that the digest of options has the choice."""
        object.__setattr__(self, "evaluation", self.evaluation.for_file(self.valid_data))

    def check_model(self, model: GPTConfig) -> None:
        """Refuse a window that a model of these options cannot have."""
        self.evaluation.window(model.seq_length, model.positions)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint and the text."""
        return {"load": (self.load,), "valid_data": (self.valid_data,)}

    def output(self) -> Output | None:
        """The folder of results.json."""
        return None if self.output_dir is None else Output.directory(self.output_dir)
