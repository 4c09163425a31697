"""Options of an evaluation, under the names of Megatron-LM's tasks. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from trainyard.config import MAX_SIZE, check_at_least, check_at_most, location
from trainyard.datasets.fine_tuning.questions import Contexts
from trainyard.errors import ConfigError
from trainyard.inference.config import SamplingConfig

TaskName = Literal["WIKITEXT103", "nq", "triviaqa", "squad", "QA"]
OF_QUESTIONS = ("nq", "triviaqa", "squad", "QA")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """The protocol, and how it divides the text into windows."""

    task: TaskName
    """Protocol; WIKITEXT103 is perplexity of any text file; nq, triviaqa and squad answer questions
    by generation, QA those that --task-description describes."""
    detokenizer: Literal["auto", "wikitext", "none"] = "auto"
    """How the file becomes plain text; auto: wikitext if its name or folder contains "wiki"."""
    overlapping_eval: int = 32
    """Tokens from one window to the next: fewer give every token more context and cost more."""
    seq_length: int | None = None
    """Tokens of a window; unset: the sequence length of the training."""
    micro_batch_size: int = 4
    """Windows evaluated, or questions answered, at a time."""

    def __post_init__(self) -> None:
        """Raise ConfigError for counts out of range."""
        check_at_least(self, 1, "overlapping_eval", "seq_length", "micro_batch_size")
        check_at_most(self, MAX_SIZE, "seq_length", "micro_batch_size")

    def for_file(self, path: str) -> EvaluationConfig:
        """The same options with `auto` resolved, by "wiki" in the name of the file or its folder.

        Upstream looks at the whole path, where a user called wikitor would count."""
        if self.detokenizer != "auto":
            return self
        near = "/".join(path.split("/")[-2:])
        return replace(self, detokenizer="wikitext" if "wiki" in near else "none")

    def window(self, trained_length: int, num_positions: int) -> int:
        """Tokens of a window: --seq-length, or that of the training. Refuses more than the model's
        positions."""
        length = self.seq_length or trained_length
        if length > num_positions:
            raise ConfigError(
                f"--seq-length {length} is longer than the {num_positions} positions of the model"
            )
        if self.overlapping_eval > length:
            raise ConfigError(
                f"--overlapping-eval {self.overlapping_eval} is longer than a window of {length} "
                "tokens, so targets would be left out; make it at most that"
            )
        return length


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionConfig:
    """Which questions are answered, and how they are asked, under the names of Megatron-LM's
    retro_text_generation.py."""

    task_description: str | None = location(None)
    """With --task QA: a JSON document that describes the questions."""
    ft_neighbours: int = 1
    """Contexts written before a question, at most; 0: none."""
    use_retrieved_neighbours: bool = False
    """Take the contexts that were retrieved (key ctxs), not those that the data set gives."""
    bert_retriever_neighbours: bool = False
    """Take the contexts of key bert_pretrain_corpus_neighbours."""
    longform_answer: bool = False
    """Compare with the answer of key longform_answer."""
    short_format: bool = False
    """Ask with "Question: ... Answer: The answer is" alone."""
    template_id: int = 0
    """Ask with one of seven templates in the style of Flan, from 1; 0: none."""
    gen_start_idx: int = 0
    """First question to answer, from 0."""
    num_gen: int = -1
    """Number of questions to answer; -1: all."""
    out_seq_length: int = 256
    """Most tokens of an answer."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        """Refuse counts out of range, and contexts from two places."""
        check_at_least(self, 0, "ft_neighbours", "gen_start_idx", "template_id")
        check_at_least(self, 1, "out_seq_length")
        check_at_least(self, -1, "num_gen")
        check_at_most(self, MAX_SIZE, "out_seq_length")
        if self.use_retrieved_neighbours and self.bert_retriever_neighbours:
            raise ConfigError(
                "--use-retrieved-neighbours and --bert-retriever-neighbours exclude each other: "
                "each names the contexts of a question; give one"
            )

    @property
    def contexts(self) -> Contexts:
        """Where the contexts of questions are."""
        if self.bert_retriever_neighbours:
            return "bert"
        return "retrieved" if self.use_retrieved_neighbours else "given"
