"""What writes each format of `--saver`, through the files of the stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from stages.context import StageRun
from stages.replacing import Replacing, replacing
from stages.reshard.config import PER_VIRTUAL_STAGE, VIRTUAL_STAGES, ReshardConfig
from stages.reshard.steps import OF_MEGATRON, refuse_strangers, save_files
from trainyard.checkpoint.foreign.hf_config import LLAMA, MISTRAL, architecture
from trainyard.checkpoint.foreign.hf_folder import write_hf_folder
from trainyard.checkpoint.foreign.into import check_source, write_step_of
from trainyard.checkpoint.foreign.megatron import write_megatron
from trainyard.checkpoint.foreign.megatron_folder import marks_of
from trainyard.checkpoint.foreign.megatron_names import ModelClass
from trainyard.checkpoint.foreign.source import Source
from trainyard.checkpoint.rewrite import OpenFile
from trainyard.errors import ConfigError
from trainyard.parallel.pipeline.partition import nearest

Save = Callable[[ReshardConfig, StageRun, Source, str], None]
"""Writes a source; the last is the loader that it was read with."""

PP = "--target-pipeline-parallel-size"

WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def save_trainyard(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Somebody else's as a step of ours."""
    check_source(source)

    def write(open_file: OpenFile, advance: Callable[[int], object]) -> None:
        write_step_of(source, loader, config.shards, open_file, advance)

    save_files(config, stage, source.step, _size(source), write)


def save_hf(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """A folder that `from_pretrained` loads."""
    architecture(source.config)  # refuse before anything is touched
    check_source(source)
    refuse_strangers(config, stage, lambda name: "/" not in name and name.endswith(WEIGHTS))
    with stage.progress(_size(source, "model."), "bytes", "reshard") as progress:
        write_hf_folder(source, config.shards, stage.open, progress.update)


def save_llama_mistral(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """The same, of a model that Megatron-LM's loader of this name takes."""
    if (found := architecture(source.config)) not in (LLAMA, MISTRAL):
        raise ConfigError(
            f"--saver llama_mistral: this model would be a {found}, neither Llama nor Mistral; "
            "--saver hf writes it"
        )
    save_hf(config, stage, source, loader)


def save_core(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Files of Megatron-LM's core models."""
    _save_megatron(config, stage, source, "core")


def save_legacy(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Files of Megatron-LM's old models."""
    _save_megatron(config, stage, source, "legacy")


def _save_megatron(
    config: ReshardConfig, stage: StageRun, source: Source, model_class: ModelClass
) -> None:
    vpp = virtual_stages(config, source.config.num_layers)
    with _into_megatron(config, stage, source) as bar:
        write_megatron(
            source,
            stage.open,
            model_class=model_class,
            tp=config.tensor_parallel_size,
            pp=config.pipeline_parallel_size,
            vpp=vpp,
            transformer_impl=None if model_class == "legacy" else config.saver_transformer_impl,
            true_vocab_size=_tokens_to_pad(config, source),
            make_vocab_size_divisible_by=config.make_vocab_size_divisible_by,
            expect=bar.expect,
            advance=bar.advance,
        )


def virtual_stages(config: ReshardConfig, num_layers: int) -> int:
    """Stages of each pipeline rank; 1 where none were asked for. Raises ConfigError, in words,
    where the layers cannot be shared out so."""
    pp = config.pipeline_parallel_size
    if num_layers % pp:
        raise ConfigError(
            f"the {num_layers} layers of the model must be divisible by {PP} ({pp}); "
            f"{nearest(PP, num_layers, pp)}"
        )
    layers = num_layers // pp
    per_stage = config.target_num_layers_per_virtual_pipeline_stage
    stages = config.target_num_virtual_stages_per_pipeline_rank or 1
    flag, divisor = (
        (VIRTUAL_STAGES, stages) if per_stage is None else (PER_VIRTUAL_STAGE, per_stage)
    )
    if layers % divisor:
        raise ConfigError(
            f"the {layers} layers of a pipeline rank must be divisible by {flag} ({divisor}); "
            f"{nearest(flag, layers, divisor)}"
        )
    return stages if per_stage is None else layers // per_stage


def save_torch_dist(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Megatron core's distributed checkpoint."""
    # torch's part for it takes seconds to import, and no other format needs it.
    from trainyard.checkpoint.foreign.torch_dist_write import write_torch_dist

    with _into_megatron(config, stage, source) as bar:
        write_torch_dist(
            source,
            stage.open,
            num_files=config.shards,
            tp=config.tensor_parallel_size,
            true_vocab_size=_tokens_to_pad(config, source),
            make_vocab_size_divisible_by=config.make_vocab_size_divisible_by,
            expect=bar.expect,
            advance=bar.advance,
        )


def _into_megatron(
    config: ReshardConfig, stage: StageRun, source: Source
) -> AbstractContextManager[Replacing]:
    """A folder of Megatron-LM's, checked before anything in it is touched."""
    check_source(source)
    refuse_strangers(config, stage, OF_MEGATRON.fullmatch)
    return replacing(stage, config.save_dir, marks_of(source.step))


def _tokens_to_pad(config: ReshardConfig, source: Source) -> int | None:
    """Tokens whose rows are to be padded anew; None: the rows stay."""
    if config.true_vocab_size is None and config.make_vocab_size_divisible_by is not None:
        return source.vocab_size
    return config.true_vocab_size


SAVERS: dict[str, Save] = {
    "trainyard": save_trainyard,
    "hf": save_hf,
    "llama_mistral": save_llama_mistral,
    "core": save_core,
    "legacy": save_legacy,
    "torch_dist": save_torch_dist,
}


def _size(source: Source, prefix: str = "") -> int:
    """Bytes of the tensors to be written."""
    return sum(s.size_bytes for name, s in source.specs.items() if name.startswith(prefix))
