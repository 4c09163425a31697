"""Options of `pretrain`: the model, its data, the optimizer, the run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join
from trainyard.config import digest_relevant, execution, location
from trainyard.errors import ConfigError
from trainyard.training.options.course import lineage_options
from trainyard.training.options.pretrain import PretrainConfig as LibraryConfig

ON_CODE_CHANGE = "TRAINYARD_ON_CODE_CHANGE"
"""Variable for --on-code-change of all runs of a machine or yard."""

CONVERTED = (
    "ckpt_convert_format",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "use_distributed_optimizer",
    "save_optim",
)
"""Options that decide the result of a conversion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainConfig(LibraryConfig):
    """Train a model on token files: a GPT, BERT, T5, Retro or Mamba (--model-type), with any mix of
    tensor, sequence, pipeline, context, expert and data parallelism.

    With the same options and data, a rerun resumes from the last checkpoint in --save."""

    RESOLVED_BY: ClassVar[str] = "stages.pretrain.resolve"

    use_checkpoint_args: bool = execution(False)
    """Take the model's options from the checkpoint of --load (or --save, to resume). Options that
    are given win; the log names each that differs."""
    on_code_change: Literal["keep", "redo"] | None = execution(None)
    """If trainyard's code has changed since the run finished: keep the run, or train it again
    (redo). Unset: the variable TRAINYARD_ON_CODE_CHANGE, or else keep."""
    ckpt_convert_format: Literal["torch", "torch_dist"] | None = execution(None)
    """Do not train: convert the checkpoint of --load to this format of Megatron-LM, and exit."""
    ckpt_convert_save: str | None = location(None)
    """Destination folder; the checkpoint goes to a subfolder with the name of the format."""

    def __post_init__(self) -> None:
        """Refuse options that only a program can use."""
        LibraryConfig.__post_init__(self)  # super() fails in a dataclass with slots
        if self.data.dataloader_type == "external":
            raise ConfigError(
                "--dataloader-type external: only a program with its own loader can use it; give "
                "single or cyclic (docs/library.md has a training loop of your own)"
            )
        self._check_conversion()

    def _check_conversion(self) -> None:
        if self.ckpt_convert_format is None:
            if self.ckpt_convert_save is not None:
                raise ConfigError("--ckpt-convert-save needs --ckpt-convert-format")
            return
        wanted = {"--load": self.load, "--ckpt-convert-save": self.ckpt_convert_save}
        missing = [flag for flag, value in wanted.items() if value is None]
        if missing:
            raise ConfigError(f"--ckpt-convert-format needs {' and '.join(missing)}")
        if self.finetune:
            raise ConfigError(
                "--finetune with --ckpt-convert-format: the converted checkpoint keeps its step; "
                "leave it out, and give --finetune when you load it (--no-save-optim omits the "
                "optimizer)"
            )

    def code_change(self) -> Literal["keep", "redo"]:
        """What to do with a finished run if only the code has changed."""
        if self.ckpt_convert_format is not None:
            return "redo"  # takes seconds
        if self.on_code_change is not None:
            return self.on_code_change
        given = os.environ.get(ON_CODE_CHANGE) or "keep"
        if given not in ("keep", "redo"):
            raise ConfigError(f"{ON_CODE_CHANGE} must be keep or redo, got {given!r}")
        return "keep" if given == "keep" else "redo"

    def identity(self) -> dict[str, Any]:
        """The options that identify the run; of a conversion, all that decide its result."""
        return digest_relevant(self) if self.ckpt_convert_format else lineage_options(self)

    def describes(self) -> tuple[str, ...]:
        """The result of a conversion depends on the layout too, unlike a training."""
        return CONVERTED if self.ckpt_convert_format else LibraryConfig.describes(self)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The inputs of the training; of a conversion only checkpoint and tokenizer."""
        if self.ckpt_convert_format is None or self.load is None:
            return LibraryConfig.inputs(self)
        return {"tokenizer": self.tokenizer.inputs(), "load": (self.load,)}

    def output(self) -> Output | None:
        """The run folder, or the folder of the format."""
        if self.ckpt_convert_format is None or self.ckpt_convert_save is None:
            return LibraryConfig.output(self)
        return Output.directory(join(self.ckpt_convert_save, self.ckpt_convert_format))

    @property
    def nproc_per_node(self) -> int:
        """Ranks that the command starts; one for a conversion."""
        return 1 if self.ckpt_convert_format else self.parallel.nproc_per_node

    @property
    def distributed_timeout_minutes(self) -> float:
        """Timeout of communication."""
        return self.parallel.distributed_timeout_minutes

    def check_ranks(self, world_size: int | None) -> None:
        """Refuse a model or batch that cannot be sharded over this many ranks. None: unknown yet;
        checks the fewest ranks that the layout allows."""
        if self.ckpt_convert_format is not None:
            return
        # Imported late: --help does not need them.
        from trainyard.parallel.dims import dims_of, expert_dims_of
        from trainyard.training.loop.length import length_of, optimizer_schedule_of

        dims = dims_of(self.parallel, world_size or self.parallel.model_ranks)
        if world_size is not None:
            expert_dims_of(self.parallel, dims)
        length = length_of(self.training, dims.dp, self.model.seq_length)
        optimizer_schedule_of(self.optimizer, self.training, length)
