"""Options of an evaluation, under the names of Megatron-LM's tasks. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from trainyard.config import (
    MAX_SIZE,
    check_at_least,
    check_at_most,
    execution,
    location,
)
from trainyard.datasets.fine_tuning.questions import Contexts
from trainyard.errors import ConfigError
from trainyard.inference.config import SamplingConfig

TaskName = Literal["WIKITEXT103", "LAMBADA", "MULTIPLE-CHOICE", "nq", "triviaqa", "squad", "QA"]
OF_QUESTIONS = ("nq", "triviaqa", "squad", "QA")
LambadaProtocol = Literal["megatron", "megatron-strict", "lm-eval"]
MAX_NGRAM = 1024
DetokenizerName = Literal["auto", "wikitext", "ptb", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """The protocol, and how it divides the text into windows."""

    task: TaskName
    """Protocol. WIKITEXT103: perplexity of any text file. LAMBADA: the last word of a passage.
    MULTIPLE-CHOICE: the likeliest of several texts. nq, triviaqa and squad answer questions by
    generation, QA those that --task-description describes."""
    detokenizer: DetokenizerName = "auto"
    """WIKITEXT103: how the file becomes plain text; auto: wikitext or ptb if its name or folder
    contains "wiki" or "ptb"."""
    overlapping_eval: int = 32
    """WIKITEXT103: tokens from the start of one window to the next. Fewer give every token more
    context, and cost more."""
    lambada_protocol: LambadaProtocol | None = None
    """LAMBADA: what is predicted, and how the passage is tokenized; unset: megatron, or
    megatron-strict with --strict-lambada. docs/evaluation.md defines them."""
    strict_lambada: bool = False
    """LAMBADA: the whole last word, not its last token."""
    seq_length: int | None = None
    """Tokens of a window, or of a context together with the scored text; unset: the sequence length
    of the training."""
    micro_batch_size: int = execution(4)
    """Windows, passages or choices scored at a time by each copy of the model, or questions
    answered."""

    def __post_init__(self) -> None:
        """Raise ConfigError for counts out of range, and for two protocols of LAMBADA."""
        check_at_least(self, 1, "overlapping_eval", "seq_length", "micro_batch_size")
        check_at_most(self, MAX_SIZE, "seq_length", "micro_batch_size")
        if self.strict_lambada and self.lambada_protocol not in (None, "megatron-strict"):
            raise ConfigError(
                "--strict-lambada means --lambada-protocol megatron-strict, and --lambada-protocol "
                f"is {self.lambada_protocol}; leave one of them out"
            )
        asked = self.strict_lambada or self.lambada_protocol is not None
        if asked and self.task != "LAMBADA":
            name = "--strict-lambada" if self.strict_lambada else "--lambada-protocol"
            raise ConfigError(f"{name} only applies with --task LAMBADA; leave it out")

    @property
    def lambada(self) -> LambadaProtocol:
        """The protocol of LAMBADA."""
        return self.lambada_protocol or ("megatron-strict" if self.strict_lambada else "megatron")

    def for_files(self, paths: tuple[str, ...]) -> EvaluationConfig:
        """The same options with `auto` resolved, by "wiki" or "ptb" in the name of each file or its
        folder. Upstream looks at the whole path, where a user called wikitor would count.

        Raises ConfigError for files that it would treat differently."""
        if self.detokenizer != "auto" or self.task != "WIKITEXT103" or not paths:
            return self
        chosen = {path: _detokenizer_for(path) for path in paths}
        first = chosen[paths[0]]
        other = next((path for path, name in chosen.items() if name != first), None)
        if other is not None:
            raise ConfigError(
                f"--detokenizer auto: by their names, {paths[0]} is detokenized by {first!r} and "
                f"{other} by {chosen[other]!r}; evaluate them apart, or name one with --detokenizer"
            )
        return replace(self, detokenizer=first)

    def window(self, trained_length: int, num_positions: int) -> int:
        """Tokens of a window: --seq-length, or that of the training. Refuses more than the model's
        positions."""
        length = self.seq_length or trained_length
        if length > num_positions:
            raise ConfigError(
                f"--seq-length {length} is longer than the {num_positions} positions of the model"
            )
        if self.task == "WIKITEXT103" and self.overlapping_eval > length:
            raise ConfigError(
                f"--overlapping-eval {self.overlapping_eval} is longer than a window of {length} "
                "tokens, so targets would be left out; make it at most that"
            )
        return length


def _detokenizer_for(path: str) -> DetokenizerName:
    near = "/".join(path.split("/")[-2:])
    return "wikitext" if "wiki" in near else "ptb" if "ptb" in near else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContaminationConfig:
    """Search for overlaps of the data sets with a corpus."""

    contamination_corpus: tuple[str, ...] = location(())
    """Prefixes of the token files of the training: count the examples that share n tokens in a row
    with one of their documents. The tokens must be those of the checkpoint's tokenizer."""
    contamination_ngram: int = 13
    """Tokens in a row that count as an overlap."""
    contamination_documents: bool = False
    """Name the documents in contamination.jsonl, with their sources if the token files have a
    sidecar (.docs)."""

    def __post_init__(self) -> None:
        """Refuse a length out of range, and documents of no corpus."""
        check_at_least(self, 1, "contamination_ngram")
        check_at_most(self, MAX_NGRAM, "contamination_ngram")
        if self.contamination_documents and not self.contamination_corpus:
            raise ConfigError(
                "--contamination-documents names documents of --contamination-corpus, which is not "
                "given"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionConfig:
    """Which questions are answered and how they are asked, with the option names of Megatron-LM's
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
    """Largest number of tokens in an answer."""
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
