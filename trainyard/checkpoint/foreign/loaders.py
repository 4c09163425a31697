"""The table of loaders: by the name that `--loader` gives, what opens a checkpoint as a source."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from trainyard.artifacts import store
from trainyard.checkpoint.foreign.assembled import AssembledSource
from trainyard.checkpoint.foreign.detect import Kind, detect, kinds_of_names
from trainyard.checkpoint.foreign.hf_read import open_huggingface
from trainyard.checkpoint.foreign.megatron import MegatronSource, open_megatron
from trainyard.checkpoint.foreign.meta import open_meta
from trainyard.checkpoint.foreign.ours import CheckpointSource
from trainyard.checkpoint.foreign.source import Source
from trainyard.checkpoint.foreign.torch_dist_read import TorchDistSource, open_torch_dist
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.strict import shown
from trainyard.errors import ConfigError

log = logging.getLogger(__name__)

Opener = Callable[[str, "Given"], Source]


@dataclass(frozen=True, slots=True)
class Given:
    """What a person told because the files do not."""

    num_attention_heads: int | None = None


NOTHING = Given()


def open_ours(url: str, given: Given) -> CheckpointSource:
    """A step of ours, or the latest of a run."""
    return CheckpointSource(open_checkpoint(url, "--load-dir"))


def open_hf(url: str, given: Given) -> AssembledSource:
    """A Hugging Face folder."""
    return open_huggingface(url)


def open_megatron_folder(url: str, given: Given) -> MegatronSource:
    """Megatron-LM's `torch` format, core and legacy models alike: which it is, the files say."""
    return open_megatron(url, num_attention_heads=given.num_attention_heads)


def open_torch_dist_folder(url: str, given: Given) -> TorchDistSource:
    """Megatron core's distributed checkpoint."""
    return open_torch_dist(url, num_attention_heads=given.num_attention_heads)


def open_llama_mistral(url: str, given: Given) -> AssembledSource:
    """Megatron-LM's loader of this name reads both layouts that Llama is published in."""
    return open_meta(url) if detect(url) == "meta" else open_huggingface(url)


LOADERS: dict[str, Opener] = {
    "trainyard": open_ours,
    "hf": open_hf,
    "llama_mistral": open_llama_mistral,
    "core": open_megatron_folder,
    "legacy": open_megatron_folder,
    "torch_dist": open_torch_dist_folder,
}

OF_KIND: dict[Kind, str] = {
    "trainyard": "trainyard",
    "hf": "hf",
    "meta": "llama_mistral",
    "megatron": "core",
    "torch_dist": "torch_dist",
}
"""The loader for what `detect` finds."""

FITS: dict[str, tuple[Kind, ...]] = {
    "hf": ("hf",),
    "llama_mistral": ("meta", "hf"),
    "core": ("megatron",),
    "legacy": ("megatron",),
    "torch_dist": ("torch_dist",),
}
"""What the loaders of others read; ours says for itself what it found."""

DESCRIBED_IN = {"config.json", "params.json"}
"""Where one of these lies alone, its reader says what else there should be."""

CALLED: dict[Kind, str] = {
    "trainyard": "a checkpoint of trainyard",
    "hf": "a Hugging Face folder",
    "meta": "Meta's files",
    "megatron": "Megatron-LM's torch format",
    "torch_dist": "Megatron-LM's torch_dist format",
}


def loader_for(url: str, asked: str = "auto") -> str:
    """The loader that was asked for, or the one for what lies there.

    Nothing that looks like a checkpoint is left to ours, which says what it found."""
    if asked != "auto":
        return asked
    kind = detect(url)
    found = "trainyard" if kind is None else OF_KIND[kind]
    log.info("--loader auto: reading %s with %s", url, found)
    return found


def open_source(url: str, loader: str, given: Given = NOTHING) -> Source:
    """The checkpoint at a URL, as one of `LOADERS` reads it.

    Raises ConfigError that says what lies there where the loader is none for it."""
    _refuse_unfit(url, loader)
    return LOADERS[loader](url, given)


def _refuse_unfit(url: str, loader: str) -> None:
    """A folder may hold several kinds, and the one that was asked for is read then."""
    wanted = FITS.get(loader)
    if wanted is None:
        return
    names = store.list_files(url)
    kinds = kinds_of_names(names)
    if set(kinds) & set(wanted) or (not kinds and DESCRIBED_IN & names.keys()):
        return
    reads = f"--loader {loader} reads {' or '.join(CALLED[kind] for kind in wanted)}"
    if kinds:
        raise ConfigError(
            f"{url}: {reads}, and what lies there is {CALLED[kinds[0]]}; give --loader "
            f"{OF_KIND[kinds[0]]}, or auto"
        )
    found = ", ".join(shown(name) for name in list(names)[:5]) if names else "nothing is there"
    raise ConfigError(f"{url}: {reads}, and there is none: {found}")
