"""Options of `python -m stages.benchmark`, under the names of Megatron-LM's inference test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import check_at_least, execution, location
from trainyard.errors import ConfigError
from trainyard.inference.config import (
    LayoutConfig,
    OutputConfig,
    SamplingConfig,
    check_length,
    check_prompt_file,
)
from trainyard.models.families import family_of
from trainyard.models.gpt.config import GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkConfig:
    """Generate text from a checkpoint with a KV cache, and measure the time."""

    load: str = location()
    """Checkpoint: the folder of a run (its latest step), of one step, of Hugging Face, Meta or
    Megatron-LM."""
    engine_type: Literal["static"] = "static"
    """static: batches that start together and stay until their last prompt has finished."""
    prompts: tuple[str, ...] = ()
    """Texts to continue."""
    prompt_file: str | None = location(None)
    """File of prompts, instead of --prompts: .jsonl with a text in each line's --prompt-key, or
    .txt with a prompt on each line."""
    prompt_key: str = "text"
    """Key of the prompt in a line of a .jsonl file."""
    chat: bool = False
    """Lay each of the prompts out as a user's turn, in the format of the checkpoint's tokenizer;
    the model answers it."""
    num_input_tokens: int | None = None
    """Length in tokens of random prompts, instead of --prompts."""
    num_tokens_to_generate: int = 30
    """Most tokens to generate for each prompt."""
    inference_max_requests: int = 8
    """Prompts in a batch; also the number of random prompts."""
    inference_max_seq_length: int | None = None
    """Refuse prompts that would grow longer than this with their new tokens; unset: the positions
    of the model."""
    bf16: bool = False
    """Compute in bfloat16."""
    fp16: bool = False
    """Compute in float16. Neither of the two: in fp32."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generation: OutputConfig = field(default_factory=OutputConfig)
    ignore_eod: bool = False
    """Continue after the end of a document, so that every prompt gets the same number of tokens."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    cuda_graph_impl: Literal["none", "local"] = execution("none")
    """local: compile the step of one token and replay it as a CUDA graph. For GPTs on one GPU."""
    num_warmups: int = execution(1)
    """Untimed runs of the first batch for 10 tokens."""
    inference_repeat_n: int = execution(1)
    """Timed repetitions; all must yield the same tokens."""
    stream: bool = execution(False)
    """Print the text of each prompt of a batch of one as its tokens are made; with larger batches,
    of the first."""
    expect: tuple[str, ...] = execution(())
    """Options that the model of the checkpoint must have, as NAME=VALUE; with others it is refused.
    The options of a model on Megatron-LM's command line come here."""
    benchmark_profile: bool = execution(False)
    """On CUDA: profile the timed repetitions alone, under `nsys profile
    --capture-range=cudaProfilerApi`."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device; auto: a GPU if available."""
    output_dir: str | None = location(None)
    """Folder or URL for generations.json, timings.json and report.html; unset: print only."""

    def __post_init__(self) -> None:
        """Refuse anything but one kind of prompt, and counts out of range."""
        self._check_prompts()
        if self.bf16 and self.fp16:
            raise ConfigError("give --bf16 or --fp16, not both")
        names = ("num_input_tokens", "num_tokens_to_generate", "inference_max_requests")
        check_at_least(self, 1, *names, "inference_repeat_n", "inference_max_seq_length")
        self.check_length(self.num_input_tokens or 1)
        check_at_least(self, 0, "num_warmups")
        if self.generation.beam_width:
            raise ConfigError("--beam-width is for stages.generate; leave it out")
        if self.cuda_graph_impl != "none" and self.nproc_per_node > 1:
            raise ConfigError(
                f"--cuda-graph-impl {self.cuda_graph_impl} is for one GPU, and --nproc-per-node is "
                f"{self.nproc_per_node}; give --cuda-graph-impl none"
            )

    def _check_prompts(self) -> None:
        given = (bool(self.prompts), self.num_input_tokens is not None, bool(self.prompt_file))
        if sum(given) != 1:
            found = "neither was" if not any(given) else "both were"
            raise ConfigError(
                "one of --prompts (texts) and --num-input-tokens (random prompts) is needed, or "
                f"--prompt-file, and {found} given"
            )
        if self.prompt_file is not None:
            check_prompt_file(self.prompt_file)
        if self.chat and self.num_input_tokens is not None:
            raise ConfigError("--chat lays --prompts out, and there are none; give some")
        if not all(self.prompts):
            raise ConfigError(
                "--prompts contains an empty text; every prompt needs at least a character"
            )

    @property
    def nproc_per_node(self) -> int:
        """Ranks to start on this machine."""
        return self.layout.nproc_per_node

    def check_length(self, prompt: int) -> None:
        """Refuse a prompt of so many tokens that grows beyond --inference-max-seq-length."""
        total, most = prompt + self.num_tokens_to_generate, self.inference_max_seq_length
        if most is not None and total > most:
            raise ConfigError(
                f"--inference-max-seq-length {most}: {prompt} tokens of a prompt and "
                f"--num-tokens-to-generate {self.num_tokens_to_generate} make {total}; raise it, "
                "or generate less"
            )

    def check_model(self, model: GPTConfig) -> None:
        """Refuse a model that writes no text, and more tokens than one of these options can see. A
        prompt has one at least."""
        if not family_of(model).generates:
            raise ConfigError(
                f"--model-type {model.model_type} writes no text here; train it by the stages alone"
            )
        length, new = self.num_input_tokens, self.num_tokens_to_generate
        what = "a prompt" if length is None else f"--num-input-tokens {length}"
        check_length(what, length or 1, new, model.positions)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint and the prompts."""
        file = self.prompt_file
        return {"load": (self.load,), "prompt_file": () if file is None else (file,)}

    def output(self) -> Output | None:
        """The folder of the documents."""
        return None if self.output_dir is None else Output.directory(self.output_dir)
