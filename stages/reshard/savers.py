"""Writers of each `--saver` format, through the stage's files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from stages.reshard.config import ReshardConfig
from stages.reshard.split import target_split
from stages.reshard.steps import OF_MEGATRON, refuse_strangers, save_files
from stages.runtime.context import Replacing, StageRun, replacing
from trainyard.checkpoint.reshard import OpenFile
from trainyard.conversion.huggingface.architecture import LLAMA, MISTRAL, architecture
from trainyard.conversion.huggingface.folder import WEIGHT_FILES, write_hf_folder
from trainyard.conversion.megatron.folder import marks_of
from trainyard.conversion.megatron.names import ModelClass
from trainyard.conversion.megatron.write import write_megatron
from trainyard.conversion.meta.params import refuse_for_meta
from trainyard.conversion.meta.read import PARAMS, SLICE
from trainyard.conversion.meta.write import write_meta_folder
from trainyard.conversion.source import Source
from trainyard.conversion.write_native import check_source, write_step_of
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)

Save = Callable[[ReshardConfig, StageRun, Source, str], None]
"""Writes a source; the last argument is the loader that read it."""


def save_trainyard(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Write a trainyard step."""
    check_source(source)
    if not source.tokenizer_files():
        log.warning(
            "%s has no tokenizer, so the new checkpoint has none and can only be trained with "
            "--finetune; give --tokenizer-type and the tokenizer's files to add one",
            source.url,
        )

    def write(open_file: OpenFile, advance: Callable[[int], object]) -> None:
        write_step_of(source, loader, config.shards, open_file, advance)

    save_files(config, stage, source.step, _size(source), write)


def save_hf(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Write a folder that `from_pretrained` loads."""
    architecture(source.config)  # raises before any file is written
    check_source(source)
    refuse_strangers(config, stage, lambda name: "/" not in name and name.endswith(WEIGHT_FILES))
    with stage.progress(_size(source, "model."), "bytes", "reshard") as progress:
        write_hf_folder(source, config.shards, stage.open, progress.update)


def save_llama_mistral(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Write a Llama or Mistral, in either layout that Megatron-LM's loader of this name reads."""
    if config.saver_checkpoint_type == "meta":
        _save_meta(config, stage, source)
        return
    if (found := architecture(source.config)) not in (LLAMA, MISTRAL):
        raise ConfigError(
            f"--saver llama_mistral: this model is a {found}, neither Llama nor Mistral; use "
            "--saver hf"
        )
    save_hf(config, stage, source, loader)


def _save_meta(config: ReshardConfig, stage: StageRun, source: Source) -> None:
    """Write a folder in the layout in which Meta publishes Llama."""
    refuse_for_meta(source.config, config.tensor_parallel_size)  # before its tensors are checked
    check_source(source)
    refuse_strangers(config, stage, _is_of_meta)
    with replacing(stage, config.save_dir, [PARAMS]) as bar:
        write_meta_folder(
            source,
            stage.open,
            num_files=config.tensor_parallel_size,
            expect=bar.expect,
            advance=bar.advance,
        )


def _is_of_meta(name: str) -> bool:
    """Whether loaders of this layout, or --loader auto, would take a file for the model."""
    return "/" not in name and bool(
        name in (PARAMS, "config.json") or SLICE.fullmatch(name) or name.endswith(WEIGHT_FILES)
    )


def save_core(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Write files of Megatron-LM's core models."""
    _save_megatron(config, stage, source, "core")


def save_legacy(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Write files of Megatron-LM's old models."""
    _save_megatron(config, stage, source, "legacy")


def save_megatron(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Write files of Megatron-LM's old models if the source is one, otherwise of core models."""
    is_legacy = getattr(source, "is_legacy", False)  # only files of Megatron-LM's ranks have it
    _save_megatron(config, stage, source, "legacy" if is_legacy else "core")


def _save_megatron(
    config: ReshardConfig, stage: StageRun, source: Source, model_class: ModelClass
) -> None:
    split = target_split(config, source.config.num_layers)
    with _into_megatron(config, stage, source) as bar:
        write_megatron(
            source,
            stage.open,
            model_class=model_class,
            tp=config.tensor_parallel_size,
            ep=config.target_expert_parallel_size or 1,
            split=split,
            transformer_impl=None if model_class == "legacy" else config.saver_transformer_impl,
            true_vocab_size=_tokens_to_pad(config, source),
            make_vocab_size_divisible_by=config.make_vocab_size_divisible_by,
            expect=bar.expect,
            advance=bar.advance,
        )


def save_torch_dist(config: ReshardConfig, stage: StageRun, source: Source, loader: str) -> None:
    """Write Megatron core's distributed checkpoint."""
    # torch.distributed.checkpoint takes seconds to import, and no other format needs it.
    from trainyard.conversion.torch_dist.write import write_torch_dist

    with _into_megatron(config, stage, source) as bar:
        write_torch_dist(
            source,
            stage.open,
            num_files=config.shards,
            tp=config.tensor_parallel_size,
            transformer_impl=config.saver_transformer_impl,
            ep=config.target_expert_parallel_size,
            true_vocab_size=_tokens_to_pad(config, source),
            make_vocab_size_divisible_by=config.make_vocab_size_divisible_by,
            expect=bar.expect,
            advance=bar.advance,
        )


def _into_megatron(
    config: ReshardConfig, stage: StageRun, source: Source
) -> AbstractContextManager[Replacing]:
    """Begin to replace a folder of Megatron-LM's format, after checking source and folder."""
    check_source(source)
    refuse_strangers(config, stage, OF_MEGATRON.fullmatch)
    return replacing(stage, config.save_dir, marks_of(source.step))


def _tokens_to_pad(config: ReshardConfig, source: Source) -> int | None:
    """The number of tokens from which to pad the vocabulary again; None: the rows stay."""
    if config.true_vocab_size is None and config.make_vocab_size_divisible_by is not None:
        return source.vocab_size
    return config.true_vocab_size


SAVERS: dict[str, Save] = {
    "trainyard": save_trainyard,
    "hf": save_hf,
    "llama_mistral": save_llama_mistral,
    "core": save_core,
    "legacy": save_legacy,
    "megatron": save_megatron,
    "torch_dist": save_torch_dist,
}


def _size(source: Source, prefix: str = "") -> int:
    """Bytes of the tensors to write."""
    return sum(s.size_bytes for name, s in source.specs.items() if name.startswith(prefix))
