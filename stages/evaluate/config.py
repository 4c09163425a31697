"""Options of `python -m stages.evaluate`, under the names of Megatron-LM's tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import execution, location
from trainyard.errors import ConfigError
from trainyard.evaluation.config import OF_QUESTIONS, EvaluationConfig, QuestionConfig
from trainyard.inference.config import check_length
from trainyard.models.gpt.config import GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Evaluate a checkpoint on a text, by the definitions of Megatron-LM's task of this name."""

    load: str = location()
    """Checkpoint: a run's folder (its latest step) or the folder of one step."""
    valid_data: str = location()
    """Text file to evaluate on, or questions as .json or .jsonl; a path or URL."""
    evaluation: EvaluationConfig
    questions: QuestionConfig = field(default_factory=QuestionConfig)
    expect: tuple[str, ...] = execution(())
    """Options that the model of the checkpoint must have, as NAME=VALUE; with others it is refused.
    The options of a model on Megatron-LM's command line come here."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device; auto: a GPU if available."""
    output_dir: str | None = location(None)
    """Folder or URL for results.json; unset: print only."""

    def __post_init__(self) -> None:
        """Choose the detokenizer by the file name, so that the digest of options has the choice.
        Refuse options of questions for a task without any."""
        object.__setattr__(self, "evaluation", self.evaluation.for_file(self.valid_data))
        task, description = self.evaluation.task, self.questions.task_description
        if task not in OF_QUESTIONS and self.questions != QuestionConfig():
            raise ConfigError(
                f"--task {task} asks no questions: --ft-neighbours, --num-gen, --temperature and "
                f"the like only apply with --task {', '.join(OF_QUESTIONS)}; leave them out"
            )
        if (task == "QA") != (description is not None):
            raise ConfigError(
                "--task QA and --task-description go together: the document says how questions "
                "are asked; give both, or neither"
            )

    def check_model(self, model: GPTConfig) -> None:
        """Refuse a window, or an answer, that a model of these options cannot have."""
        if self.evaluation.task in OF_QUESTIONS:
            new = self.questions.out_seq_length
            check_length("a prompt", 1, new, model.positions, "--out-seq-length")
            return
        self.evaluation.window(model.seq_length, model.positions)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint, the text, and the description of its questions."""
        described = self.questions.task_description
        return {
            "load": (self.load,),
            "valid_data": (self.valid_data,),
            **({} if described is None else {"task_description": (described,)}),
        }

    def output(self) -> Output | None:
        """The folder of results.json."""
        return None if self.output_dir is None else Output.directory(self.output_dir)
