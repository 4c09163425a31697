"""Options that depend on the checkpoint, the data or the ranks: --use-checkpoint-args, --epochs,
--skip-train. Imports what they need only if they are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.pretrain.config import PretrainConfig
from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.checkpoint.steps import CONFIG, TOKENIZER, find_steps, locate_step, step_document
from trainyard.config import digest_relevant, flag, leaves
from trainyard.errors import ArtifactError, ConfigError

OPTION = "--use-checkpoint-args"

OF_TOKENIZER = {"tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"}
"""Options that name a tokenizer; without any of them the checkpoint's is used."""


def beneath(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(options that those given override, remarks to log): with --use-checkpoint-args, those of the
    model and the tokenizer in the checkpoint of `load`, or of the run in `save`.

    given: the options of the command line and its document; a remark names each that differs."""
    if not given.get("use_checkpoint_args"):
        return {}, []
    load = given.get("load") or given.get("save")
    if load is None:
        raise ConfigError(f"{OPTION} takes the model's options from --load, which is not given")
    if load == given.get("save") and not _has_checkpoint(load):
        return {}, [f"{OPTION}: {load} has no checkpoint yet; the options are those given"]
    known = {name for name, _, _ in leaves(PretrainConfig)}
    stored = {name: value for name, value in _stored(load).items() if name in known}
    _check_family(load, stored, given)
    taken = {name: value for name, value in stored.items() if name not in given}
    remarks = [f"{OPTION}: {len(taken)} options of the model are those of {load}"]
    for name, value in given.items():
        value = list(value) if isinstance(value, tuple) else value
        if name in stored and stored[name] != value:
            before = "no value" if stored[name] is None else stored[name]
            remarks.append(f"{OPTION}: {flag(name)} {value} replaces {before} of {load}")
    tokenizer = {} if OF_TOKENIZER & given.keys() else _tokenizer(load)
    if tokenizer:
        remarks.append(f"{OPTION}: the tokenizer is that of {load}")
    return {**tokenizer, **taken}, remarks


def _check_family(load: str, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse options of one family of models over those of another."""
    found, wanted = stored.get("model_type"), given.get("model_type")
    if found is not None and wanted not in (None, found):
        raise ConfigError(
            f"{OPTION}: {load} holds a model of --model-type {found}, not {wanted}; give "
            f"--model-type {found}"
        )


def _has_checkpoint(folder: str) -> bool:
    from trainyard.conversion.detect import detect

    return detect(folder) not in ("trainyard", None) or bool(find_steps(folder))


def _stored(load: str) -> dict[str, Any]:
    from trainyard.conversion.detect import detect, loader_for

    if detect(load) in ("trainyard", None):
        url, _ = locate_step(load, f"{OPTION}: --load")
        found = step_document(url, CONFIG).get("model")
        if not isinstance(found, dict):
            raise ArtifactError(f"{url}: its {CONFIG} describes no model, so {OPTION} cannot")
        return found
    from trainyard.conversion.loaders import open_source

    with open_source(load, loader_for(load)) as source:
        return digest_relevant(source.config)


def _tokenizer(load: str) -> dict[str, Any]:
    """The tokenizer that a checkpoint of ours carries; {} for another's."""
    from trainyard.conversion.detect import detect
    from trainyard.tokenizers.carried import DESCRIPTION, carried_options

    if detect(load) not in ("trainyard", None):
        return {}
    url, _ = locate_step(load, f"{OPTION}: --load")
    folder = join(url, TOKENIZER)
    if not store.exists(join(folder, DESCRIPTION)):
        return {}
    return {name: value for name, value in carried_options(folder).items() if value is not None}


def resolved(config: PretrainConfig, world_size: int) -> PretrainConfig:
    """The options of a run on this many ranks."""
    is_plain = config.training.epochs is None and not config.skip_train
    if is_plain or config.ckpt_convert_format is not None:
        return config
    from trainyard.parallel.dims import dims_of
    from trainyard.training import resolve

    dims = dims_of(config.parallel, max(world_size, config.parallel.model_ranks))
    return resolve.resolved(config, dims.dp)
