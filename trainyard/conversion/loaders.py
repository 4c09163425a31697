"""The table of loaders: functions that open a checkpoint as a source, by `--loader` name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainyard.checkpoint.load import open_checkpoint
from trainyard.conversion.detect import detect, refuse_unfit
from trainyard.conversion.huggingface.read import open_huggingface
from trainyard.conversion.lazy_tensors import AssembledSource
from trainyard.conversion.megatron.read import MegatronSource, open_megatron
from trainyard.conversion.meta.read import open_meta
from trainyard.conversion.native import CheckpointSource
from trainyard.conversion.source import Source
from trainyard.conversion.torch_dist.read import TorchDistSource, open_torch_dist
from trainyard.errors import ConfigError

Opener = Callable[[str, "LoadOptions"], Source]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options that replace information missing in the files."""

    num_attention_heads: int | None = None


NO_OPTIONS = LoadOptions()


def open_ours(url: str, options: LoadOptions) -> CheckpointSource:
    """A trainyard step, or the latest of a run."""
    return CheckpointSource(open_checkpoint(url, "--load-dir"))


def open_hf(url: str, options: LoadOptions) -> AssembledSource:
    """A Hugging Face folder."""
    return open_huggingface(url)


def open_megatron_folder(url: str, options: LoadOptions) -> MegatronSource:
    """Megatron-LM's `torch` format, for core and legacy models; the files say which."""
    return open_megatron(url, num_attention_heads=options.num_attention_heads)


def open_torch_dist_folder(url: str, options: LoadOptions) -> TorchDistSource:
    """Megatron core's distributed checkpoint."""
    return open_torch_dist(url, num_attention_heads=options.num_attention_heads)


def open_llama_mistral(url: str, options: LoadOptions) -> AssembledSource:
    """Both layouts in which Llama is published, as Megatron-LM's loader of this name."""
    return open_meta(url) if detect(url) == "meta" else open_huggingface(url)


def open_mixtral(url: str, options: LoadOptions) -> AssembledSource:
    """A Hugging Face folder with experts, as Megatron-LM's loader of this name."""
    source = open_huggingface(url)
    if not source.config.experts.enabled:
        source.close()
        raise ConfigError(
            f"--loader mixtral_hf: the model at {url} has no experts; give --loader hf"
        )
    return source


LOADERS: dict[str, Opener] = {
    "trainyard": open_ours,
    "hf": open_hf,
    "llama_mistral": open_llama_mistral,
    "mixtral_hf": open_mixtral,
    "core": open_megatron_folder,
    "legacy": open_megatron_folder,
    "torch_dist": open_torch_dist_folder,
}


def open_source(url: str, loader: str, options: LoadOptions = NO_OPTIONS) -> Source:
    """The checkpoint at a URL, opened by one of `LOADERS`.

    Raises ConfigError, which names the kind of checkpoint found, if the loader cannot read it."""
    refuse_unfit(url, loader)
    return LOADERS[loader](url, options)
