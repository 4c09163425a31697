"""Options of `python -m stages.plan`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stages.plan.moments import with_moments
from trainyard.artifacts.output import Output
from trainyard.config import (
    MAX_SIZE,
    also,
    check_above_zero,
    check_at_least,
    check_at_most,
    execution,
    location,
)
from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.config_checks import check_params
from trainyard.models.costs.memory import check_layout
from trainyard.models.families import MODEL_OPTIONS
from trainyard.models.parallel_layout import ParallelLayout
from trainyard.optim.config import OptimizerKind
from trainyard.optim.precision import MomentFormat, PrecisionConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.data_config import DataParallelConfig, ShardingStrategy
from trainyard.parallel.dims import dims_of, expert_dims_of
from trainyard.parallel.layout_checks import check_model
from trainyard.parallel.pipeline.partition import Partition, partition
from trainyard.parallel.pipeline.schedule import GROUP, choose_group_size
from trainyard.stored_values import stored_as
from trainyard.tokenizers.config import TokenizerConfig, TokenizerType
from trainyard.training.options.pretrain import PretrainConfig

GPT2_TOKENS = 50257
"""Counted if nothing says how many tokens there are."""
SIZES = (
    *("vocab_size", "padded_vocab_size", "micro_batch_size", "global_batch_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "data_parallel_size"),
    "world_size",
)

SHARDING = (
    *("use_distributed_optimizer", "data_parallel_sharding_strategy", "use_megatron_fsdp"),
    *("use_torch_fsdp2", "torch_fsdp2_reshard_after_forward"),
    "num_distributed_optimizer_instances",
)
"""Options of `DataParallelConfig` that decide about memory."""

OF_PRECISION = (
    *("fp16", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "grad_reduce_in_fp16"),
    *("use_precision_aware_optimizer", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
)
"""Options of the formats of gradients and moments."""
OF_TOKENIZER = ("tokenizer_model", "vocab_file", "merge_file", "vocab_extra_ids")

CUTTING = (
    *("tensor_model_parallel_size", "sequence_parallel", "context_parallel_size"),
    *("pipeline_model_parallel_size", "pipeline_model_parallel_layout"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)
"""Options of `ParallelConfig` that cut the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Count parameters, FLOPs and theoretical memory of a training run without building
    anything.

    --config takes a document of pretrain, such as the presets in recipes/models; options that do
    not affect a plan are ignored. With --retro, plan the steps that build Retro's neighbours
    instead; with --corpus, the preparation of a corpus (see --retro --help, --corpus --help)."""

    DESCRIBES: ClassVar[tuple[str, ...]] = (
        "recompute_granularity",
        "recompute_activations",
        "recompute_modules",
        "recompute_method",
        "recompute_num_layers",
        "cpu_offloading_num_layers",
    )
    ALSO_READS: ClassVar[tuple[type, ...]] = (PretrainConfig,)

    model: TransformerConfig = field(metadata=MODEL_OPTIONS)
    vocab_size: int | None = None
    """Tokens of the tokenizer, before padding; unset: those in its files, or GPT-2's."""
    padded_vocab_size: int | None = None
    """Rows of the embedding, instead of the number of tokens."""
    tokenizer_type: TokenizerType | None = None
    """Kind of tokenizer whose tokens are counted; unset: determined by the files given."""
    tokenizer_model: str | None = location(None)
    """Its tokenizer.json, or the folder of it."""
    vocab_file: str | None = location(None)
    """Its vocab.json (GPT2BPETokenizer) or vocab.txt (BertWordPiece)."""
    merge_file: str | None = location(None)
    """Its merges.txt (GPT2BPETokenizer)."""
    vocab_extra_ids: int | None = stored_as({None: 0, 0: -1})
    """Sentinel tokens added to it (BertWordPiece); unset: 100 with BertWordPieceCase."""
    bf16: bool = False
    """Count bytes of weights in bfloat16, which is also the default."""
    fp16: bool = False
    """Count bytes of weights in float16, whose gradients have a copy in fp32."""
    fp32: bool = False
    """Count bytes of weights in fp32."""
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Compute in FP8; weights stay in 16 bits."""
    fp8_param_gather: bool = False
    """Does not change memory: weights that were gathered in FP8 are kept in 16 bits."""
    accumulate_allreduce_grads_in_fp32: bool | None = None
    """Keep gradients in fp32 where nothing is added to them, too."""
    grad_reduce_in_bf16: bool = False
    """Count bytes of gradients in bfloat16."""
    grad_reduce_in_fp16: bool = False
    """Count bytes of gradients in float16."""
    use_precision_aware_optimizer: bool = False
    """Allow the formats of the next three options other than fp32."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Count bytes of gradients in this format, as --grad-reduce-in-bf16 does."""
    exp_avg_dtype: MomentFormat = "fp32"
    """Count bytes of Adam's first moment in this format, fp32 or bf16."""
    exp_avg_sq_dtype: MomentFormat = "fp32"
    """Count bytes of Adam's second moment in this format, fp32 or bf16."""
    micro_batch_size: int = 1
    """Samples of a micro-batch."""
    global_batch_size: int | None = None
    """Samples of a step; unset: micro-batch size x data-parallel size."""
    tensor_model_parallel_size: int = 1
    """Devices that share each layer."""
    pipeline_model_parallel_size: int = 1
    """Stages that the layers are spread over."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of a chunk under the interleaved pipeline schedule; unset: the plain schedule."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Number of chunks under the interleaved schedule, instead of their layers."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline rank; the other ranks share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline rank; the other ranks share the rest evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer in the pipeline split."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the output layer and loss as a layer in the pipeline split."""
    pipeline_model_parallel_layout: str | None = None
    """Every pipeline stage spelled out: E embedding, t transformer layer, L loss, | next stage; x*3
    repeats x."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Consecutive micro-batches of a chunk under the interleaved schedule; unset: the fewest that
    fit."""
    show_schedule: bool = False
    """Draw the pipeline schedule: as text, and as schedule.svg with --output-dir."""
    context_parallel_size: int = 1
    """Devices that share each sequence."""
    expert_model_parallel_size: int = 1
    """Devices that experts are spread over."""
    expert_tensor_parallel_size: int | None = None
    """Devices that share each expert; unset: as --tensor-model-parallel-size."""
    data_parallel_size: int | None = None
    """Replicas; unset: from --world-size, otherwise 1."""
    world_size: int | None = also("nproc_per_node", default=None)
    """Devices in all: tensor x pipeline x context x data-parallel size."""
    sequence_parallel: bool = False
    """Split norms and dropout along the sequence over the tensor-parallel devices."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over replicas and context-parallel ranks (ZeRO-1)."""
    data_parallel_sharding_strategy: ShardingStrategy | None = None
    """What they shard: nothing (no_shard), state (optim), gradients too (optim_grads), or weights
    too (optim_grads_params); unset: what the flags around it ask for."""
    use_torch_fsdp2: bool = False
    """Shard weights, gradients and state over replicas and context-parallel ranks."""
    torch_fsdp2_reshard_after_forward: bool = True
    """With --use-torch-fsdp2: weights are whole for one layer at a time, not for all."""
    use_megatron_fsdp: bool = False
    """The same as --use-torch-fsdp2, and --data-parallel-sharding-strategy may ask for less."""
    num_distributed_optimizer_instances: int = 1
    """Groups of replicas, each of which shards all that they shard."""
    optimizer: OptimizerKind = "adam"
    """Count bytes of its moments; those of muon are of the matrices of layers."""
    muon_scalar_optimizer: Literal["adam", "lion"] = "adam"
    """Whose moments muon has for the embedding and the output layer."""
    optimizer_cpu_offload: bool = False
    """Keep the optimizer's state in host memory."""
    optimizer_offload_fraction: float = 1.0
    """Share of it that --optimizer-cpu-offload keeps there."""
    gpu_memory_gib: float | None = None
    """Memory of a device. A layout that needs more is refused, and the error names the nearest
    layouts that fit; unset: no limit."""
    inference_max_seq_length: int | None = None
    """Tokens of a request with its output, for the memory of generation; unset: all positions."""
    inference_memory_gib: float | None = None
    """Memory of a device that generates, to say how many requests fit; unset: that is not said."""
    json: bool = execution(False)
    """Print one JSON document instead of the report."""
    output_dir: str | None = location(None)
    """Folder or URL for plan.json and schedule.svg; unset: print only."""

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together."""
        check_above_zero(self, *SIZES)
        self._check_formats()
        check_at_most(self, MAX_SIZE, *SIZES)
        if self.gpu_memory_gib is not None and self.gpu_memory_gib <= 0:
            raise ConfigError(f"--gpu-memory-gib must be positive, got {self.gpu_memory_gib}")
        check_at_least(self, 1, "inference_max_seq_length")
        check_at_most(self, MAX_SIZE, "inference_max_seq_length")
        if self.inference_memory_gib is not None and self.inference_memory_gib <= 0:
            given = self.inference_memory_gib
            raise ConfigError(f"--inference-memory-gib must be positive, got {given}")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError(
                "--sequence-parallel needs --tensor-model-parallel-size above 1; give "
                "--no-sequence-parallel if a file sets it"
            )
        if self.global_batch % (self.micro_batch_size * self.replicas):
            raise ConfigError(
                f"--global-batch-size ({self.global_batch}) must be divisible by "
                f"--micro-batch-size ({self.micro_batch_size}) x data-parallel size "
                f"({self.replicas})"
            )
        if self.num_chunks > 1:
            choose_group_size(
                self.pipeline_model_parallel_size,
                self.num_microbatches,
                self.microbatch_group_size_per_virtual_pipeline_stage,
            )
        elif self.microbatch_group_size_per_virtual_pipeline_stage is not None:
            raise ConfigError(
                f"{GROUP} applies only to the interleaved schedule; give "
                "--num-virtual-stages-per-pipeline-rank too, or leave it out"
            )
        model = self.model
        model.check_parallel(self.parallel())
        expert_dims_of(self.parallel(), dims_of(self.parallel(), self.num_devices))
        check_layout(self.layout(), model)
        check_params(model, self.rows)
        check_model(
            self.parallel(),
            num_layers=model.all_layers,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.query_groups,
            ffn_hidden_size=model.ffn_size,
            seq_length=model.seq_length,
        )

    def _check_formats(self) -> None:
        given = [f"--{name}" for name in ("bf16", "fp16", "fp32") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} exclude each other; give one")
        self.precision()
        if not 0.0 <= (share := self.optimizer_offload_fraction) <= 1.0:
            raise ConfigError(f"--optimizer-offload-fraction must be in [0, 1], got {share}")
        if self.fp8_param_gather and self.fp8_format is None:
            raise ConfigError("--fp8-param-gather needs --fp8-format, which is not given")
        if self.vocab_size is None and self.padded_vocab_size is None:
            self.tokenizer()
        elif self.padded_vocab_size is not None and self.padded_vocab_size < (self.vocab_size or 1):
            raise ConfigError(
                f"--padded-vocab-size ({self.padded_vocab_size}) must be at least --vocab-size "
                f"({self.vocab_size})"
            )

    @property
    def replicas(self) -> int:
        """Data-parallel size: the option, or from the world size."""
        degrees = {
            "--tensor-model-parallel-size": self.tensor_model_parallel_size,
            "--pipeline-model-parallel-size": self.pipeline_model_parallel_size,
            "--context-parallel-size": self.context_parallel_size,
        }
        if self.world_size is None:
            return self.data_parallel_size or self._fewest_replicas
        ranks = math.prod(degrees.values())
        replicas, rest = divmod(self.world_size, ranks)
        if rest or self.data_parallel_size not in (None, replicas):
            given = self.data_parallel_size
            last = f"--data-parallel-size ({given})" if given else "a whole number of replicas"
            product = " x ".join(f"{flag} ({size})" for flag, size in degrees.items())
            near = [ranks * given] if given else [ranks * n for n in (replicas, replicas + 1) if n]
            raise ConfigError(
                f"{self.world_size} ranks in all (--world-size, or nproc_per_node of a document) "
                f"must be {product} x {last}: "
                f"{' or '.join(map(str, near))} would do"
            )
        return replicas

    @property
    def _fewest_replicas(self) -> int:
        """With which every expert-parallel rank is there."""
        tp = self.tensor_model_parallel_size
        spread = self.expert_model_parallel_size * (self.expert_tensor_parallel_size or tp)
        return spread // math.gcd(spread, tp * self.context_parallel_size)

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        sizes = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size)
        return math.prod(sizes) * self.context_parallel_size * self.replicas

    @property
    def global_batch(self) -> int:
        """Samples of a step: the option, or one micro-batch for each replica."""
        return self.global_batch_size or self.micro_batch_size * self.replicas

    @property
    def rows(self) -> int:
        """Rows of the embedding: the option, or the tokens and what pads them."""
        if self.padded_vocab_size is not None:
            return self.padded_vocab_size
        tokens = GPT2_TOKENS if self.vocab_size is None else self.vocab_size
        return self.model.padded_vocab_size(tokens, self.tensor_model_parallel_size)

    @property
    def number_format(self) -> str:
        """The format of weights, in `BYTES_OF`."""
        return "fp16" if self.fp16 else "fp32" if self.fp32 else "bf16"

    def precision(self) -> PrecisionConfig:
        """The formats of gradients and moments, as a run configures them."""
        return PrecisionConfig(
            bf16=self.number_format == "bf16",
            **{name: getattr(self, name) for name in OF_PRECISION},
        )

    def tokenizer(self) -> TokenizerConfig | None:
        """The tokenizer whose files are counted, or None; ConfigError if it lacks an option."""
        kind = self.tokenizer_type
        if kind is None and self.tokenizer_model is not None:
            kind = "HuggingFaceTokenizer"
        if kind is None and self.vocab_file is not None:
            kind = "GPT2BPETokenizer" if self.merge_file else "BertWordPieceLowerCase"
        if kind is None:
            return None
        given = {name: getattr(self, name) for name in OF_TOKENIZER}
        return TokenizerConfig(tokenizer_type=kind, **given)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step on each replica."""
        return self.global_batch // (self.micro_batch_size * self.replicas)

    def partition(self) -> Partition:
        """The layers of each pipeline rank and chunk."""
        return partition(self, self.model.all_layers)

    @property
    def num_chunks(self) -> int:
        """Chunks of each pipeline rank."""
        return len(self.partition()[0])

    def parallel(self) -> ParallelConfig:
        """The layout as a run configures it."""
        cut = {name: getattr(self, name) for name in CUTTING}
        return ParallelConfig(**cut, data_parallel=self.data_parallel())

    def data_parallel(self) -> DataParallelConfig:
        """What the replicas shard."""
        return DataParallelConfig(**{name: getattr(self, name) for name in SHARDING})

    def layout(self) -> ParallelLayout:
        """The layout as the memory formulas need it."""
        ranks = [sum(len(stage.layers) for stage in rank) for rank in self.partition()]
        layout = ParallelLayout(
            micro_batch_size=self.micro_batch_size,
            num_microbatches=self.num_microbatches,
            tp=self.tensor_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
            cp=self.context_parallel_size,
            dp=self.replicas,
            ep=self.expert_model_parallel_size,
            expert_tp=self.expert_tensor_parallel_size,
            layers_per_virtual_stage=self.num_layers_per_virtual_pipeline_stage,
            virtual_stages=self.num_chunks,
            first_rank_layers=ranks[0] if len(set(ranks)) > 1 else None,
            sequence_parallel=self.sequence_parallel,
            recompute=self.model.recompute,
            sharding=self.data_parallel().sharding,
            instances=self.num_distributed_optimizer_instances,
            fp32=self.fp32,
            gradient_bytes=4 if self.precision().grads_format == "fp32" else 2,
            offloaded=self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0,
        )
        adam, kinds = self.precision().moment_bytes, (self.optimizer, self.muon_scalar_optimizer)
        return with_moments(layout, kinds, adam, self.model, self.rows)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The files of a tokenizer that is counted."""
        files = (self.tokenizer_model, self.vocab_file)
        given = tuple(url for url in files if url)
        is_unsized = (self.vocab_size, self.padded_vocab_size) == (None, None)
        return {"tokenizer": given} if given and is_unsized else {}

    def output(self) -> Output | None:
        """The folder of plan.json and schedule.svg."""
        return None if self.output_dir is None else Output.directory(self.output_dir)
