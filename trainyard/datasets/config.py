"""Where training data lies and how it is cut, under Megatron-LM's names. Standard library only."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from trainyard.config import execution, location
from trainyard.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")


@dataclass(frozen=True, slots=True)
class Source:
    """One prefix of a blend."""

    prefix: str
    weight: float | None
    """Its share, relative to the others; None when no weights were given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Token files and how samples are drawn from them."""

    data_path: tuple[str, ...] = location(())
    """Prefixes of .bin/.idx pairs, cut by --split: PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX
    ..."""
    train_data_path: tuple[str, ...] = location(())
    """Prefixes for training alone, in place of --data-path."""
    valid_data_path: tuple[str, ...] = location(())
    """Prefixes for validation alone."""
    test_data_path: tuple[str, ...] = location(())
    """Prefixes for testing alone."""
    split: str = "969, 30, 1"
    """Relative parts of the documents for training, validation and testing."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single: once through the samples in order; cyclic: shuffled again every epoch of samples."""
    data_sharding: bool = True
    """With cyclic: each data-parallel rank shuffles a share of its own."""
    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""
    reset_attention_mask: bool = False
    """Let no token attend to another document."""
    eod_mask_loss: bool = False
    """Leave the token after each end of document out of the loss."""
    mid_level_dataset_surplus: float = 0.005
    """Share of samples that each dataset of a blend holds beyond its weight."""
    num_workers: int = execution(0)
    """Processes that load samples ahead; 0 loads them between steps."""

    def __post_init__(self) -> None:
        """Refuse what cannot be read, in words."""
        parse_split(self.split)
        apart = self.train_data_path + self.valid_data_path + self.test_data_path
        if self.data_path and apart:
            raise ConfigError(
                "--data-path is cut by --split; give it, or --train-data-path, --valid-data-path "
                "and --test-data-path, not both"
            )
        if not self.data_path and not self.train_data_path:
            raise ConfigError("--data-path is required: the prefix of a .bin/.idx pair")
        for flag, paths in self._paths().items():
            parse_blend(paths, flag)
        if self.num_workers < 0:
            raise ConfigError(f"--num-workers must be at least 0, got {self.num_workers}")

    def _paths(self) -> dict[str, tuple[str, ...]]:
        return {
            "--data-path": self.data_path,
            "--train-data-path": self.train_data_path,
            "--valid-data-path": self.valid_data_path,
            "--test-data-path": self.test_data_path,
        }

    def sources(self, split: str) -> list[Source]:
        """What the samples of a split come from; empty when nothing was given for it."""
        if self.data_path:
            return parse_blend(self.data_path, "--data-path")
        paths = {"train": self.train_data_path, "valid": self.valid_data_path}
        return parse_blend(paths.get(split, self.test_data_path), f"--{split}-data-path")

    def fractions(self, split: str) -> tuple[float, float]:
        """The part of the documents that a split takes, as bounds in [0, 1]."""
        if not self.data_path:
            return (0.0, 1.0)
        return parse_split(self.split)[SPLIT_NAMES.index(split)]

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Every prefix as an input of its own; its weight is part of the name, so that it
        counts."""
        named: dict[str, tuple[str, ...]] = {}
        for kind, paths in zip(
            ("data", "train", "valid", "test"), self._paths().items(), strict=True
        ):
            for number, source in enumerate(parse_blend(paths[1], paths[0])):
                weight = "" if source.weight is None else f" (weight {source.weight!r})"
                named[f"{kind}_{number}{weight}"] = (source.prefix,)
        return named


def parse_split(split: str) -> list[tuple[float, float]]:
    """Bounds of training, validation and test: "969, 30, 1" is 0 to 0.969, to 0.999, to 1."""
    try:
        parts = [float(part) for part in re.findall(r"[.0-9]+", split)]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or re.search(r"[^.0-9,\s]", split) or sum(parts) <= 0:
        raise ConfigError(
            f"--split {split!r} must be up to three numbers of at least 0, such as '969, 30, 1'"
        )
    parts += [0.0] * (3 - len(parts))
    total = math.fsum(parts)
    bounds = [0.0]
    for part in parts:
        bounds.append(bounds[-1] + part / total)
    return [(bounds[0], bounds[1]), (bounds[1], bounds[2]), (bounds[2], bounds[3])]


def parse_blend(paths: tuple[str, ...], flag: str) -> list[Source]:
    """`WEIGHT PREFIX ...` or `PREFIX ...` as sources."""
    weights = [_number(path) for path in paths[::2]]
    if len(paths) < 2 or all(weight is None for weight in weights):
        sources = [Source(path, None) for path in paths]
    elif len(paths) % 2 or None in weights:
        raise ConfigError(
            f"{flag} {' '.join(paths)}: give every prefix a weight (WEIGHT PREFIX WEIGHT PREFIX "
            "...) or none of them"
        )
    else:
        sources = [Source(p, w) for w, p in zip(weights, paths[1::2], strict=True)]
    for source in sources:
        _check_prefix(source.prefix, flag)
    return sources


def _check_prefix(prefix: str, flag: str) -> None:
    if prefix.endswith((".bin", ".idx")):
        raise ConfigError(f"{flag} {prefix}: give the prefix of the pair, {prefix[:-4]}")
    if _number(prefix) is not None:
        raise ConfigError(f"{flag}: {prefix} stands where a prefix is expected")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
