"""Options of `python -m stages.generate`, under the names of Megatron-LM's programs for text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import MAX_SIZE, check_at_least, check_at_most, execution, location
from trainyard.errors import ConfigError
from trainyard.inference.config import (
    GREEDY,
    LayoutConfig,
    OutputConfig,
    SamplingConfig,
    check_length,
    check_prompt_file,
)
from trainyard.models.gpt.config import GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Continue prompts by a model, or answer them with --chat.

    A prompt's text depends on its place in the list, the seed and the model: not on the batch it is
    in, the number of ranks, or on how often the run was killed."""

    load: str = location()
    """Checkpoint: the folder of a run (its latest step), of one step, of Hugging Face, Meta or
    Megatron-LM."""
    prompts: tuple[str, ...] = ()
    """Texts to continue."""
    prompt_file: str | None = location(None)
    """File of prompts: .jsonl with a text in each line's --prompt-key, or .txt with a prompt on
    each line."""
    prompt_format: Literal["jsonl", "txt"] | None = None
    """What is in --prompt-file, if its name does not say."""
    prompt_key: str = "text"
    """Key of the prompt in a line of a .jsonl file; prompt.text is the text in its prompt."""
    num_samples: int | None = None
    """Without prompts: number of texts, each from nothing but the token that begins documents. With
    them: continue only this many, the first ones."""
    samples_per_prompt: int | None = None
    """Texts for each prompt, one after another, each with random numbers of its own; unset: 1."""
    chat: bool = False
    """Lay each prompt out as a user's turn, in the format of the checkpoint's tokenizer; the model
    answers it."""
    num_tokens_to_generate: int = 30
    """Most tokens to generate for each prompt."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generation: OutputConfig = field(default_factory=OutputConfig)
    ignore_eod: bool = False
    """Continue after the end of a document."""
    inference_max_requests: int = 8
    """Prompts in a batch: a killed run keeps the batches that it finished."""
    bf16: bool = False
    """Compute in bfloat16."""
    fp16: bool = False
    """Compute in float16. Neither of the two: in fp32."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """Keep keys and values in E4M3 without a scale, half the memory of 16 bits; unset: in the type
    of the run. Not for T5 and Retro."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    cuda_graph_impl: Literal["none", "local"] | None = execution(None)
    """local: compile the step of one token, on a GPU as a CUDA graph: worth it for many batches.
    For GPTs without experts, Mamba-2 and hybrids, each copy on one rank."""
    expect: tuple[str, ...] = execution(())
    """Options that the model of the checkpoint must have, as NAME=VALUE; a different model is
    refused. Model options on a command line of Megatron-LM are passed on here."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device; auto: a GPU if available."""
    output_dir: str | None = location(None)
    """Folder or URL for generations.jsonl; unset: print the texts."""

    def __post_init__(self) -> None:
        """Refuse anything but one source of prompts, and counts out of range."""
        self._check_prompts()
        if self.bf16 and self.fp16:
            raise ConfigError("give --bf16 or --fp16, not both")
        counts = ("num_tokens_to_generate", "inference_max_requests", "samples_per_prompt")
        check_at_least(self, 1, *counts, "num_samples")
        check_at_most(self, MAX_SIZE, *counts, "num_samples")
        if self.generation.min_tokens > self.num_tokens_to_generate:
            raise ConfigError(
                f"--min-tokens {self.generation.min_tokens} is more than --num-tokens-to-generate "
                f"{self.num_tokens_to_generate}; lower it"
            )
        self._check_compiled()
        if self.generation.beam_width and self.ignore_eod:
            raise ConfigError("--beam-width needs an end; leave --ignore-eod out")
        if self.generation.beam_width and self.sampling != GREEDY:
            raise ConfigError(
                "--beam-width looks for the likeliest text and draws no token; leave the options "
                "of sampling and --seed out"
            )

    def _check_compiled(self) -> None:
        if self.cuda_graph_impl != "local":
            return
        if self.layout.parallel().model_ranks > 1:
            raise ConfigError(
                "--cuda-graph-impl local is for a model on one rank; leave it out, or "
                "--tensor-model-parallel-size and --pipeline-model-parallel-size"
            )
        if self.generation.beam_width:
            raise ConfigError(
                "--beam-width searches without a compiled step; leave --cuda-graph-impl local out"
            )

    def _check_prompts(self) -> None:
        if self.prompts and self.prompt_file is not None:
            raise ConfigError(
                "one of --prompts (texts) and --prompt-file (a file of them) is needed, and both "
                "were given"
            )
        if not self.has_prompts and self.num_samples is None:
            raise ConfigError(
                "one of --prompts (texts) and --prompt-file (a file of them) is needed, and "
                "neither was given; or --num-samples, for texts from nothing"
            )
        if self.prompt_file is not None:
            check_prompt_file(self.prompt_file, self.prompt_format)
        if self.chat and not self.has_prompts:
            raise ConfigError("--chat answers prompts; give some, or leave it out")
        if self.samples_per_prompt is not None and not self.has_prompts:
            raise ConfigError(
                "--samples-per-prompt is of prompts, and none is given; give the number of texts "
                "as --num-samples"
            )
        repeated = "--num-samples" if not self.has_prompts else "--samples-per-prompt"
        count = self.samples_per_prompt if self.has_prompts else self.num_samples
        if (count or 1) > 1 and (self.sampling.greedy or self.generation.beam_width):
            raise ConfigError(
                f"{repeated} {count}: every text would be the same, as the likeliest one is taken; "
                "give --top-k 0 (--top-k is 1 unless given), with --top-p or a temperature"
            )

    @property
    def has_prompts(self) -> bool:
        """Whether texts continue something."""
        return bool(self.prompts) or self.prompt_file is not None

    @property
    def nproc_per_node(self) -> int:
        """Ranks to start on this machine."""
        return self.layout.nproc_per_node

    def check_model(self, model: GPTConfig) -> None:
        """Refuse more tokens than a model of these options can see. A prompt has one at least."""
        check_length("a prompt", 1, self.num_tokens_to_generate, model.positions)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint and the prompts."""
        file = self.prompt_file
        return {"load": (self.load,), "prompt_file": () if file is None else (file,)}

    def output(self) -> Output | None:
        """The folder of generations.jsonl."""
        return None if self.output_dir is None else Output.directory(self.output_dir)
