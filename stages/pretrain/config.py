"""Options of `pretrain`: the model, its data, the optimizer, the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join
from trainyard.config import execution, location
from trainyard.errors import ConfigError
from trainyard.training.options.pretrain import PretrainConfig as LibraryConfig

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
"""Options that decide what a conversion makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainConfig(LibraryConfig):
    """Train a GPT on token files, over any mix of tensor, sequence, pipeline, context and data
    parallelism.

    Run again with the same options and data it continues from its last checkpoint in --save."""

    ckpt_convert_format: Literal["torch", "torch_dist"] | None = execution(None)
    """Do not train: write the checkpoint of --load in this format of Megatron-LM, and end."""
    ckpt_convert_save: str | None = location(None)
    """Where to: a folder, in which one of the name of the format is made."""

    def __post_init__(self) -> None:
        """Refuse what only a program that calls the library can mean."""
        LibraryConfig.__post_init__(self)  # super() and slots do not meet
        if self.data.dataloader_type == "external":
            raise ConfigError(
                "--dataloader-type external: only a program that brings a loader along can use it, "
                "and this command has none; give single or cyclic (docs/library.md has a loop of "
                "your own)"
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
                "--finetune with --ckpt-convert-format: what is written keeps its step; leave it "
                "out, and give --finetune where it is loaded (--no-save-optim leaves the "
                "optimizer out)"
            )

    def describes(self) -> tuple[str, ...]:
        """What a conversion makes depends on the layout, too, which changes no training."""
        return CONVERTED if self.ckpt_convert_format else LibraryConfig.describes(self)

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Those of the training; of a conversion the checkpoint and the tokenizer alone."""
        if self.ckpt_convert_format is None or self.load is None:
            return LibraryConfig.inputs(self)
        return {"tokenizer": self.tokenizer.inputs(), "load": (self.load,)}

    def output(self) -> Output:
        """The run folder, or that of the format."""
        if self.ckpt_convert_format is None or self.ckpt_convert_save is None:
            return LibraryConfig.output(self)
        return Output.directory(join(self.ckpt_convert_save, self.ckpt_convert_format))

    @property
    def nproc_per_node(self) -> int:
        """Ranks that the command line starts; one converts."""
        return 1 if self.ckpt_convert_format else self.parallel.nproc_per_node

    @property
    def distributed_timeout_minutes(self) -> float:
        """How long ranks wait for each other."""
        return self.parallel.distributed_timeout_minutes

    def check_ranks(self, world_size: int | None) -> None:
        """Refuse what so many ranks cannot share; None: it is not known yet how many there will
        be, and the fewest that the degrees allow are looked at."""
        if self.ckpt_convert_format is not None:
            return
        # Not for --help.
        from trainyard.optim.schedule import build_schedule
        from trainyard.parallel.dims import dims_of
        from trainyard.training.loop.length import length_of

        dims = dims_of(self.parallel, world_size or self.parallel.model_ranks)
        length = length_of(self.training, dims.dp, self.model.seq_length)
        training = self.training
        build_schedule(
            self.optimizer, training.train_iters, length.global_batch_size, training.train_samples
        )
