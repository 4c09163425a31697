"""Options of `python -m stages.evaluate`, under the names of Megatron-LM's tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import execution, location
from trainyard.errors import ConfigError
from trainyard.evaluation.config import (
    OF_QUESTIONS,
    ContaminationConfig,
    EvaluationConfig,
    QuestionConfig,
)
from trainyard.inference.config import LayoutConfig, check_length
from trainyard.models.config import TransformerConfig
from trainyard.tokenizers.config import TokenizerConfig, TokenizerType


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Evaluate a checkpoint on data sets, by the definitions of Megatron-LM's tasks and of
    others."""

    load: str = location()
    """Checkpoint: a run's folder (its latest step), the folder of one step, or a folder of Hugging
    Face, Meta or Megatron-LM. Any layout: each rank reads its part."""
    valid_data: tuple[str, ...] = location()
    """Data sets, each scored separately: text files; questions or passages as .json or .jsonl;
    folders of RACE; .tsv files of MNLI and QQP. Paths or URLs."""
    evaluation: EvaluationConfig
    questions: QuestionConfig = field(default_factory=QuestionConfig)
    contamination: ContaminationConfig = field(default_factory=ContaminationConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    tokenizer_type: TokenizerType | None = None
    """Tokenizer for a checkpoint that has none, by Megatron-LM's name. If the checkpoint has one,
    it must be the same."""
    vocab_file: str | None = location(None)
    """GPT2BPETokenizer: vocab.json."""
    merge_file: str | None = location(None)
    """GPT2BPETokenizer: merges.txt."""
    tokenizer_model: str | None = location(None)
    """A tokenizer.json or its folder, or a SentencePiece .model."""
    expect: tuple[str, ...] = execution(())
    """Options that the model of the checkpoint must have, as NAME=VALUE; a different model is
    refused. Model options on a command line of Megatron-LM are passed on here."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device; auto: a GPU if available."""
    output_dir: str | None = location(None)
    """Folder or URL for results.json and the scores of all examples; unset: print only. With it, a
    killed evaluation resumes where it stopped."""

    def __post_init__(self) -> None:
        """Choose the detokenizer by the file names, so that the digest of options has the choice.
        Refuse options of questions for a task without any."""
        if not self.valid_data:
            raise ConfigError("--valid-data names no file; give at least one")
        object.__setattr__(self, "evaluation", self.evaluation.for_files(self.valid_data))
        self._check_questions()
        if self.contamination.contamination_documents and self.output_dir is None:
            raise ConfigError(
                "--contamination-documents writes contamination.jsonl to --output-dir; give it"
            )
        self.given_tokenizer()

    def _check_questions(self) -> None:
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

    def given_tokenizer(self) -> TokenizerConfig | None:
        """The tokenizer that the options name, if they name one."""
        files = (self.vocab_file, self.merge_file, self.tokenizer_model)
        if self.tokenizer_type is None:
            if any(files):
                raise ConfigError(
                    "--vocab-file, --merge-file and --tokenizer-model are the files of a "
                    "tokenizer; give --tokenizer-type too, or leave them out for the checkpoint's "
                    "own"
                )
            return None
        try:
            return TokenizerConfig(
                tokenizer_type=self.tokenizer_type,
                vocab_file=self.vocab_file,
                merge_file=self.merge_file,
                tokenizer_model=self.tokenizer_model,
            )
        except ConfigError as error:
            raise ConfigError(f"{error}; or leave it out: the checkpoint brings its own") from error

    @property
    def nproc_per_node(self) -> int:
        """Ranks that the command starts."""
        return self.layout.nproc_per_node

    @property
    def distributed_timeout_minutes(self) -> float:
        """Timeout of communication."""
        return self.layout.distributed_timeout_minutes

    def check_ranks(self, world_size: int | None) -> None:
        """Refuse ranks that copies of the model do not divide."""
        from trainyard.parallel.dims import dims_of  # not for --help

        parallel = self.layout.parallel()
        dims_of(parallel, world_size or parallel.model_ranks)

    def check_model(self, model: TransformerConfig) -> None:
        """Refuse a window, or an answer, that a model of these options cannot have."""
        if self.evaluation.task in OF_QUESTIONS:
            new = self.questions.out_seq_length
            check_length("a prompt", 1, new, model.positions, "--out-seq-length")
            return
        self.evaluation.window(model.seq_length, model.positions)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint, the data sets, and what describes or accompanies them."""
        corpus = self.contamination.contamination_corpus
        described, tokenizer = self.questions.task_description, self.given_tokenizer()
        return {
            "load": (self.load,),
            "valid_data": self.valid_data,
            **({} if described is None else {"task_description": (described,)}),
            **({"contamination_corpus": corpus} if corpus else {}),
            **({} if tokenizer is None else {"tokenizer": tokenizer.inputs()}),
        }

    def output(self) -> Output | None:
        """The folder of results.json."""
        return None if self.output_dir is None else Output.directory(self.output_dir)
