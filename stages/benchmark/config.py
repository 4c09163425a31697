"""Options of `python -m stages.benchmark`, under the names of Megatron-LM's inference test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import check_at_least, differing, execution, flag, location
from trainyard.errors import ConfigError
from trainyard.inference.config import (
    LayoutConfig,
    OutputConfig,
    SamplingConfig,
    check_length,
    check_prompt_file,
)
from trainyard.inference.dynamic.config import DynamicConfig
from trainyard.load_test.config import LoadTestConfig
from trainyard.models.families import family_of
from trainyard.models.gpt.config import GPTConfig

OF_A_MODEL_HERE = (
    *("engine_type", "chat", "bf16", "fp16", "inference_max_seq_length", "cuda_graph_impl"),
    *("nproc_per_node", "tensor_model_parallel_size", "pipeline_model_parallel_size", "stream"),
    *("distributed_backend", "benchmark_profile", "expect", "add_bos"),
    *("return_log_probs", "termination_id", "prevent_newline_after_colon", "top_p_decay"),
    *("stop_on_eol", "stop_on_double_eol", "kv_cache_dtype", "inference_weight_dtype"),
    "inference_attention_backend",
)
"""Options that say nothing to a server."""

OF_BATCHES = ("stream", "return_log_probs", "benchmark_profile", "cuda_graph_impl")
"""Options of the static engine's figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkConfig:
    """Generate text from a checkpoint with a KV cache, or ask a server for it, and measure the
    time."""

    load: str | None = location(None)
    """Checkpoint: the folder of a run (its latest step), of one step, of Hugging Face, Meta or
    Megatron-LM. With --url, its tokenizer makes random prompts."""
    engine_type: Literal["static", "dynamic"] = "static"
    """static: batches that start together and stay until their last prompt has finished. dynamic:
    requests that come and go, as the options of the load say."""
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
    load_test: LoadTestConfig = field(default_factory=LoadTestConfig)
    engine: DynamicConfig = field(default_factory=DynamicConfig)
    cuda_graph_impl: Literal["none", "local"] = execution("none")
    """local: compile the step of one token and replay it as a CUDA graph. For GPTs on one GPU.
    A smaller last batch is padded."""
    num_warmups: int = execution(1)
    """Untimed runs of the first batch for 10 tokens; of a load, requests that no figure counts."""
    inference_repeat_n: int = execution(1)
    """Timed repetitions; all must yield the same tokens."""
    stream: bool = execution(False)
    """Print the text of each prompt of a batch of one as its tokens are made; with larger batches,
    of the first."""
    expect: tuple[str, ...] = execution(())
    """Options that the model of the checkpoint must have, as NAME=VALUE; a different model is
    refused. Model options on a command line of Megatron-LM are passed on here."""
    benchmark_profile: bool = execution(False)
    """On CUDA: profile the timed repetitions alone, under `nsys profile
    --capture-range=cudaProfilerApi`."""
    device: Literal["auto", "cpu", "cuda"] = execution("auto")
    """Device; auto: a GPU if available."""
    output_dir: str | None = location(None)
    """Folder or URL for generations.json and timings.json, of a load requests.jsonl and
    summary.json, and report.html; unset: print only."""

    def __post_init__(self) -> None:
        """Refuse anything but one kind of prompt, and counts out of range."""
        self._check_what_runs()
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

    @property
    def is_load_test(self) -> bool:
        """Whether requests come and go, in place of batches."""
        return self.load_test.url is not None or self.engine_type == "dynamic"

    def _check_what_runs(self) -> None:
        """Refuse options of what does not run."""
        if self.load_test.url is None:
            if self.load is None:
                raise ConfigError(
                    "load is required (flag --load) and was not given; or give --url, the address "
                    "of a server"
                )
        else:
            given = [name for name in OF_A_MODEL_HERE if name in differing(self)]
            if given:
                raise ConfigError(
                    f"{flag(given[0])} says how a model runs here, and with --url a server runs "
                    "it; leave it out"
                )
        of_load = differing(self.load_test)
        if of_load and not self.is_load_test:
            raise ConfigError(
                f"{flag(next(iter(of_load)))} is of a load; give --engine-type dynamic or --url too"
            )
        if self.is_load_test:
            self._check_lengths()
        elif self.engine.inference_attention_backend is not None:
            raise ConfigError(
                "--inference-attention-backend is of --engine-type dynamic; give that, or leave it "
                "out"
            )
        if self.engine_type == "dynamic":
            given = [name for name in OF_BATCHES if name in differing(self)]
            if given:
                raise ConfigError(f"{flag(given[0])} is of --engine-type static; leave it out")

    def _check_lengths(self) -> None:
        for name, other in (
            ("input_lengths", "num_input_tokens"),
            ("output_lengths", "num_tokens_to_generate"),
        ):
            if getattr(self.load_test, name) is not None and other in differing(self):
                raise ConfigError(f"{flag(name)} and {flag(other)} are two lengths; give one")
        needs_tokens = self.num_input_tokens is not None or self.load_test.input_lengths
        if needs_tokens and self.load is None:
            raise ConfigError(
                "random prompts are made of the tokens of a checkpoint's tokenizer; name it with "
                "--load, or give --prompts"
            )

    def _check_prompts(self) -> None:
        load = self.load_test
        given = (
            bool(self.prompts),
            self.num_input_tokens is not None or load.input_lengths is not None,
            bool(self.prompt_file),
            load.trace_file is not None,
        )
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
        """Refuse a prompt of this many tokens that grows beyond --inference-max-seq-length."""
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
        named = {
            "load": self.load,
            "prompt_file": self.prompt_file,
            "trace_file": self.load_test.trace_file,
        }
        return {name: () if url is None else (url,) for name, url in named.items()}

    def output(self) -> Output | None:
        """The folder of the documents."""
        return None if self.output_dir is None else Output.directory(self.output_dir)
