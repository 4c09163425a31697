"""Options of generation, under the names of Megatron-LM's generation programs. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import MAX_PROCESSES, MAX_RANKS, check_at_least, check_at_most, execution
from trainyard.errors import ConfigError
from trainyard.parallel.config import ParallelConfig

MAX_TOP_N = 1000
"""Log-probabilities beside the chosen one, at most."""
MAX_BEAMS = 1000
LEAST_PENALTY = 0.01
"""Of --repetition-penalty: with the least temperature, logits over less are infinite in fp32."""
LEAST_TEMPERATURE = 1e-4
"""Logits over less than this are infinite in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Penalties, temperature, top-k or top-p, min-p; top-k 1 or temperature 0 is greedy."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int = 1
    """Choose among this many likeliest tokens; 1 is greedy, 0 is all."""
    top_p: float = 0.0
    """Choose among the likeliest tokens that together reach this probability; 0 is all."""
    top_p_decay: float = 0.0
    """Multiply --top-p by this after each token of a text; 0 is never."""
    top_p_bound: float = 0.0
    """Lower limit of --top-p under --top-p-decay."""
    min_p: float = 0.0
    """Choose among the tokens whose probability is at least this share of the likeliest one's; 0 is
    all."""
    repetition_penalty: float = 1.0
    """Divide the positive logits of tokens of prompt and output by this, and multiply the negative
    ones (arXiv:1909.05858, section 4.1)."""
    presence_penalty: float = 0.0
    """Subtract this from the logit of each token that the output already has, as in OpenAI's
    interface."""
    frequency_penalty: float = 0.0
    """Subtract this from the logit of a token for each time that it is already in the output."""
    seed: int = 1234
    """Seed of the random numbers; each prompt has its own sequence."""

    def __post_init__(self) -> None:
        """Refuse values out of range, and options that exclude each other."""
        if self.temperature and not LEAST_TEMPERATURE <= self.temperature <= 100.0:
            raise ConfigError(
                f"--temperature must be 0 (greedy) or in [{LEAST_TEMPERATURE}, 100], got "
                f"{self.temperature}"
            )
        if self.top_k < 0:
            raise ConfigError(f"--top-k must be 0 (all) or more, got {self.top_k}")
        for name in ("top_p", "top_p_decay", "top_p_bound", "min_p"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be in [0, 1], got {getattr(self, name)}")
        if self.top_k > 0 and self.top_p > 0.0:
            raise ConfigError(
                f"--top-k {self.top_k} and --top-p {self.top_p} exclude each other; "
                "set one of them to 0 (--top-k is 1 unless given)"
            )
        if self.top_p == 0.0 and (self.top_p_decay or self.top_p_bound):
            raise ConfigError("--top-p-decay and --top-p-bound change --top-p; give one above 0")
        if self.top_p_bound > self.top_p:
            raise ConfigError(
                f"--top-p-bound {self.top_p_bound} is the least --top-p, which is {self.top_p}; "
                "lower it"
            )
        if self.min_p and self.greedy:
            raise ConfigError(
                f"--min-p {self.min_p} chooses among tokens, and --top-k 1 or --temperature 0 "
                "leaves one; give --top-k 0 and a temperature"
            )
        self._check_penalties()
        if self.seed < 0:
            raise ConfigError(f"--seed must be 0 or more, got {self.seed}")

    def _check_penalties(self) -> None:
        if not LEAST_PENALTY <= self.repetition_penalty <= 100.0:
            raise ConfigError(
                f"--repetition-penalty must be in [{LEAST_PENALTY}, 100], got "
                f"{self.repetition_penalty}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -100.0 <= getattr(self, name) <= 100.0:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be in [-100, 100], got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        """Whether no random number is used."""
        return self.top_k == 1 or self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens so far change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def top_p_after(self, num_tokens: int) -> float:
        """--top-p of the token after so many of the output."""
        if not self.top_p_decay:
            return self.top_p
        return max(self.top_p * self.top_p_decay**num_tokens, self.top_p_bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """When a text ends, and what is returned with it."""

    add_bos: bool = False
    """Begin each prompt with the tokenizer's first token (its BOS, or else its end of document)."""
    min_tokens: int = 0
    """Tokens before a text may end."""
    stop_words: tuple[str, ...] = ()
    """Texts that end an output; they are left out of it."""
    termination_id: int | None = None
    """Token that ends an output; unset: the tokenizer's end of document."""
    stop_on_eol: bool = False
    """End an output at the end of a line."""
    stop_on_double_eol: bool = False
    """End an output at an empty line."""
    prevent_newline_after_colon: bool = False
    """Do not choose a line's end right after a colon."""
    return_log_probs: bool = False
    """Write the log-probability of every token of prompt and output, by the model's own logits."""
    skip_prompt_log_probs: bool = False
    """With --return-log-probs: of the output alone."""
    top_n_logprobs: int = 0
    """With --return-log-probs: also of this many likeliest tokens in each place."""
    beam_width: int = 0
    """Search the likeliest text with this many beams, in place of sampling; 0: do not search."""
    length_penalty: float = 1.0
    """Of --beam-width: a text scores the sum of its log-probabilities over its length to this
    power."""

    def __post_init__(self) -> None:
        """Refuse values out of range, and options without effect."""
        check_at_least(self, 0, "min_tokens", "top_n_logprobs", "beam_width", "termination_id")
        check_at_most(self, MAX_BEAMS, "beam_width")
        if not all(self.stop_words):
            raise ConfigError("--stop-words contains an empty text, which ends every output")
        if self.top_n_logprobs > MAX_TOP_N:
            raise ConfigError(
                f"--top-n-logprobs must be at most {MAX_TOP_N}, got {self.top_n_logprobs}"
            )
        if (self.top_n_logprobs or self.skip_prompt_log_probs) and not self.return_log_probs:
            given = "--top-n-logprobs" if self.top_n_logprobs else "--skip-prompt-log-probs"
            raise ConfigError(f"{given} is of --return-log-probs; give that too")
        if self.length_penalty != 1.0 and not self.beam_width:
            raise ConfigError("--length-penalty is of --beam-width; give that too")
        if self.beam_width and self.return_log_probs:
            raise ConfigError(
                "--beam-width writes the score of a text; leave --return-log-probs out"
            )
        if self.beam_width and (self.min_tokens or self.all_stop_words):
            raise ConfigError(
                "--beam-width ends texts with --termination-id alone; leave --min-tokens and stop "
                "words out"
            )

    @property
    def all_stop_words(self) -> tuple[str, ...]:
        """--stop-words and the ends of lines."""
        lines = ("\n",) * self.stop_on_eol + ("\n\n",) * self.stop_on_double_eol
        return self.stop_words + lines


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """How many ranks share a copy of the model, whatever layout trained it. Further ranks hold
    further copies and divide the work. Results do not depend on this, up to rounding."""

    nproc_per_node: int = execution(1)
    """Ranks to start on this machine. Under torchrun, or a scheduler that sets RANK, each process
    is a rank already."""
    tensor_model_parallel_size: int = execution(1)
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = execution(1)
    """Ranks that share the layers, one group of layers after another."""
    distributed_backend: Literal["nccl", "gloo"] | None = execution(None)
    """Communication between ranks; unset: nccl on CUDA devices, gloo on CPUs."""
    distributed_timeout_minutes: float = execution(10.0)
    """How long a rank waits for the others before it considers one of them dead."""

    def __post_init__(self) -> None:
        """Raise ConfigError for degrees out of range."""
        degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        check_at_least(self, 1, "nproc_per_node", *degrees)
        check_at_most(self, MAX_RANKS, *degrees)
        check_at_most(self, MAX_PROCESSES, "nproc_per_node")

    def parallel(self) -> ParallelConfig:
        """The same for process groups and layers."""
        return ParallelConfig(
            nproc_per_node=self.nproc_per_node,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            distributed_backend=self.distributed_backend,
            distributed_timeout_minutes=self.distributed_timeout_minutes,
        )


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


def check_prompt_file(url: str, form: str | None = None) -> None:
    """Refuse a file name that does not say what is in it, unless another option does.

    form: jsonl or txt."""
    if form is None and not url.endswith((".jsonl", ".txt")):
        raise ConfigError(
            f"--prompt-file {url}: the name must end with .jsonl (a JSON object on each line) or "
            ".txt (a prompt on each line)"
        )


GREEDY = SamplingConfig()
