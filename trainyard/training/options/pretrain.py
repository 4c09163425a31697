"""Options of a pretraining: the model, its data, the optimizer, the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.config import also, execution, flag, location
from trainyard.datasets.config import DataConfig
from trainyard.datasets.fim_config import FimConfig
from trainyard.datasets.fine_tuning.config import SftConfig
from trainyard.datasets.masked.config import MaskedConfig
from trainyard.errors import ConfigError
from trainyard.models.config import TransformerConfig
from trainyard.models.families import MODEL_OPTIONS, family_of
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.precision import PrecisionConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.layout_checks import check_model
from trainyard.retrieval.options import RetrievalConfig
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.training.options.fp8_checks import check_fp8
from trainyard.training.options.logging import LoggingConfig
from trainyard.training.options.node_local import NonPersistentConfig
from trainyard.training.options.optimizer_checks import check_optimizer
from trainyard.training.options.profile import ProfileConfig
from trainyard.training.options.sharding_checks import check_sharding
from trainyard.training.options.training import TrainingConfig
from trainyard.training.options.watch import WatchConfig

OF_DOCUMENTS = (
    *("mock_data", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
    *("dataloader_inter_document_masking", "create_attention_mask_in_dataloader"),
)
"""Options of data that samples of sentences, and of conversations, do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainConfig:
    """A training from the first step to the last, over any mix of tensor, sequence, pipeline,
    context and data parallelism."""

    model: TransformerConfig = field(metadata=MODEL_OPTIONS)
    tokenizer: TokenizerConfig
    data: DataConfig
    masked: MaskedConfig = field(default_factory=MaskedConfig)
    fim: FimConfig = field(default_factory=FimConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    optimizer: OptimizerConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    training: TrainingConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfileConfig = field(default_factory=ProfileConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    non_persistent: NonPersistentConfig = field(default_factory=NonPersistentConfig)
    save: str | None = location(None)
    """Folder of the run: its checkpoints, ledger and manifest. Unset: train and log, but keep
    nothing."""
    load: str | None = location(None)
    """Checkpoint of another run to start from: a run folder (its last step) or a step folder."""
    new_run: bool = execution(False)
    """Start over at step 0 if --save holds a run with another model, data, seed or kind of
    optimizer, and move its steps to superseded/ at the first checkpoint. Without this flag such a
    --save is refused. With other rates, length, batch size or validation a run continues."""
    verify_checkpoint: Literal["none", "sizes", "digests"] = execution("sizes")
    """How to check a step against its manifest before loading it: only documents (none), the sizes
    of all files, or the digests of the files that are read. A damaged step of this run is
    skipped."""
    finetune: bool = False
    """Take only the weights from --load; step, optimizer and data start over. A restart resumes
    from the run's own checkpoints in --save."""
    load_optim: bool = True
    """Load the optimizer with --load. Without it moments and schedule start over; step and data
    continue. A restart resumes from the run's own checkpoints in --save."""
    skip_train: bool = also("eval_only", default=False, role="execution")
    """Do not train: evaluate the checkpoint of --load, or of --save, on validation and test data,
    and keep nothing."""
    exit_on_missing_checkpoint: bool = execution(False)
    """Refuse to start from initial weights if --load is --save and has no checkpoint yet. Any other
    --load without a checkpoint is always refused."""
    load_allow_missing: tuple[str, ...] = ()
    """With --finetune: weights that may be missing from --load and are then initialised, as
    patterns of names such as model.output_layer.* (see stages.inspect)."""
    load_allow_unexpected: tuple[str, ...] = ()
    """With --finetune: weights in --load that this model does not have and that are ignored, as
    patterns of names."""

    @property
    def DESCRIBES(self) -> tuple[str, ...]:  # noqa: N802
        """Execution options that are part of the lineage of this run."""
        return self.describes()

    def describes(self) -> tuple[str, ...]:
        """Without --global-batch-size, a step is one micro-batch on each rank."""
        return ("micro_batch_size",) if self.training.global_batch_size is None else ()

    def __post_init__(self) -> None:
        """Refuse invalid combinations."""
        if self.finetune and self.load is None:
            raise ConfigError("--finetune takes weights from --load, which is not given")
        self._check_allowed()
        if self.non_persistent.non_persistent_save_interval and not self.training.save_optim:
            raise ConfigError(
                "--non-persistent-save-interval and --no-save-optim: these saves only serve to "
                "resume, which needs the optimizer; leave one of them out"
            )
        if not self.load_optim and self.load is None:
            raise ConfigError("--no-load-optim: takes the rest from --load, which is not given")
        if self.skip_train and not self.training.eval_iters:
            raise ConfigError("--skip-train measures nothing with --eval-iters 0; give a number")
        if self.save is None and not self.skip_train:
            self._check_unsaved()
        model = self.model
        self._check_samples()
        model.check_parallel(self.parallel)
        check_optimizer(self.optimizer, self.precision, self.parallel.data_parallel.sharding)
        check_fp8(model, self.precision, self.parallel, self.training.micro_batch_size)
        check_sharding(model, self.parallel, self.watch)
        check_model(
            self.parallel,
            num_layers=model.all_layers,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.query_groups,
            ffn_hidden_size=model.ffn_size,
            seq_length=model.seq_length,
            rule="--window-size" if model.window_size is not None else self._rule_of_data(),
        )

    def _check_unsaved(self) -> None:
        """Refuse options that only apply to what --save keeps."""
        given = {
            "--non-persistent-save-interval": self.non_persistent.non_persistent_save_interval,
            "--save-performance-summary": self.logging.save_performance_summary,
            "--log-progress": self.logging.log_progress,
            "--new-run": self.new_run,
        }
        for option, value in given.items():
            if value:
                raise ConfigError(f"{option} needs --save, the folder of the run; give it too")

    def _check_samples(self) -> None:
        """Refuse options that only apply to the samples of other families of models."""
        family, chosen = family_of(self.model), f"--model-type {self.model.model_type}"
        self._check_instructions()
        self._check_fim()
        if not family.of_sentences:
            if self.masked != MaskedConfig():
                raise ConfigError(
                    f"--mask-prob and --short-seq-prob do not apply with {chosen}, which predicts "
                    "every token; leave them out, or give --model-type bert or t5"
                )
            self._check_neighbors()
            return
        for name in OF_DOCUMENTS:
            if getattr(self.data, name):
                raise ConfigError(
                    f"{flag(name)} does not apply with {chosen}: its samples are runs of "
                    "sentences of one document, from token files made with --split-sentences; "
                    "leave it out"
                )
        if self.parallel.context_parallel_size > 1:
            raise ConfigError(
                f"--context-parallel-size ({self.parallel.context_parallel_size}) does not apply "
                f"with {chosen}, whose samples are padded; use --tensor-model-parallel-size with "
                "--sequence-parallel"
            )
        losses = family.more_losses(self.model)
        if losses and self.training.calculate_per_token_loss:
            raise ConfigError(
                f"--calculate-per-token-loss weighs tokens, and the {losses[0]} of {chosen} has "
                "none; leave it out"
            )

    def _check_instructions(self) -> None:
        """Refuse --sft for models without it, its options without it, and those of documents."""
        if not self.sft.sft:
            if self.sft != SftConfig():
                raise ConfigError(
                    "--sft-packing, --no-answer-loss-only, --ft-neighbours and the other options "
                    "of instruction data only apply with --sft; give it, or leave them out"
                )
            return
        if family_of(self.model).of_sentences:
            raise ConfigError(
                f"--sft does not apply with --model-type {self.model.model_type}, which writes no "
                "answers from left to right; give gpt, retro or mamba"
            )
        for name in OF_DOCUMENTS:
            # No loss is ever behind the end of a conversation, so --eod-mask-loss asks for nothing.
            if getattr(self.data, name) and name != "eod_mask_loss":
                raise ConfigError(
                    f"{flag(name)} does not apply with --sft: conversations have positions and "
                    "bounds of their own; leave it out"
                )

    def _check_fim(self) -> None:
        """Refuse --fim-data where samples are not text of documents, and its options without it."""
        if not self.fim.fim_data:
            if self.fim != FimConfig():
                raise ConfigError(
                    "--fim-rate, --fim-spm-rate and the other options of fill-in-the-middle only "
                    "apply with --fim-data; give it, or leave them out"
                )
            return
        if not family_of(self.model).of_documents:
            raise ConfigError(
                f"--fim-data does not apply with --model-type {self.model.model_type}; it "
                "rearranges the texts of a GPT"
            )
        for name, given in (("--sft", self.sft.sft), ("--mock-data", self.data.mock_data)):
            if given:
                raise ConfigError(
                    f"--fim-data and {name} exclude each other: only documents of token files have "
                    "a middle to fill in; leave one of them out"
                )

    def _check_neighbors(self) -> None:
        """Refuse neighbours for models that have none, and options that do not go with them."""
        family, chosen = family_of(self.model), f"--model-type {self.model.model_type}"
        if family.neighbor_shape is None:
            if self.retrieval != RetrievalConfig():
                raise ConfigError(
                    f"--retro-db does not apply with {chosen}, which attends to its own text only; "
                    "leave it out, or give --model-type retro"
                )
            return
        if self.sft.sft:
            if self.retrieval != RetrievalConfig():
                raise ConfigError(
                    "--retro-project-dir and --retro-db do not apply with --sft: instruction data "
                    "has no neighbours, and the encoder of a Retro is not used; leave them out"
                )
            return
        if not self.retrieval.is_given:
            raise ConfigError(
                f"{chosen} needs --retro-project-dir, or --retro-db and --retro-train-neighbors, "
                "the outputs of retro_db and faiss_query"
            )
        if self.training.eval_iters and not self.retrieval.may_have("valid"):
            raise ConfigError(
                f"--eval-iters {self.training.eval_iters} needs --retro-valid-neighbors, the "
                "output of faiss_query with --retro-query-split valid; or give --eval-iters 0"
            )
        if self.data.mock_data:
            raise ConfigError(f"--mock-data has no documents, and {chosen} needs neighbours")

    def _rule_of_data(self) -> str | None:
        """The flag that keeps attention inside a document."""
        if self.sft.sft and self.sft.sft_packing != "off":
            return "--sft"
        if self.data.reset_attention_mask:
            return "--reset-attention-mask"
        inside = self.data.dataloader_inter_document_masking
        return "--dataloader-inter-document-masking" if inside else None

    def _check_allowed(self) -> None:
        for name in ("load_allow_missing", "load_allow_unexpected"):
            patterns, flag = getattr(self, name), "--" + name.replace("_", "-")
            if patterns and not self.finetune:
                raise ConfigError(
                    f"{flag} {patterns[0]}: a run that resumes needs all of its tensors; only "
                    "--finetune, which takes the weights alone, may leave some out"
                )

    @property
    def bounds_attention(self) -> bool:
        """Whether samples say where documents begin, and attention stops there."""
        return self._rule_of_data() is not None

    @property
    def has_positions(self) -> bool:
        """Whether samples bring the positions of their tokens."""
        data = self.data
        own = data.reset_position_ids or data.dataloader_inter_document_masking
        return own or self.sft.sft

    def foreign_load(self) -> str | None:
        """The checkpoint of another run; None if --load is --save, as resuming is the default."""
        ours = None if self.save is None else self.save.rstrip("/")
        same = self.load is not None and self.load.rstrip("/") == ours
        return None if same else self.load

    @property
    def run_folder(self) -> str:
        """The folder of a run that is kept."""
        assert self.save is not None, "this run keeps nothing"
        return self.save

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Each prefix of token files, the tokenizer, the checkpoint of --load."""
        load = self.foreign_load()
        return {
            **self.data.inputs(),
            **self.retrieval.inputs(),
            "tokenizer": self.tokenizer.inputs(),
            "load": (load,) if load else (),
        }

    def output(self) -> Output | None:
        """The run folder; None without --save."""
        return None if self.save is None else Output.directory(self.save)
