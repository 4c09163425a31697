"""Options for training data and its splits, by Megatron-LM's names. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainyard.config import (
    MAX_PROCESSES,
    check_at_least,
    check_at_most,
    course,
    execution,
    location,
)
from trainyard.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")
MOCK_SPLIT = "1, 1, 1"
"""The split of --mock-data, which ignores --split."""


@dataclass(frozen=True, slots=True)
class Source:
    """One prefix of a blend."""

    prefix: str
    weight: float | None
    """Its share, relative to the others; None without weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Token files and how samples are drawn from them."""

    data_path: tuple[str, ...] = location(())
    """Prefixes of .bin/.idx pairs, divided by --split: PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX
    ... A folder of pairs, or the prefix of a merge --virtual, is one dataset."""
    train_data_path: tuple[str, ...] = location(())
    """Prefixes for training only, instead of --data-path."""
    valid_data_path: tuple[str, ...] = location(())
    """Prefixes for validation only."""
    valid_data_split: str | None = course(None)
    """Parts of the documents of --valid-data-path, as in --split, of which the second is used for
    validation. Unset: use all documents."""
    test_data_path: tuple[str, ...] = location(())
    """Prefixes for testing only, measured once, after the last step."""
    data_args_path: str | None = location(None)
    """File with the values of --data-path, separated by white space."""
    per_split_data_args_path: str | None = location(None)
    """JSON file with the values of --train-data-path, --valid-data-path and --test-data-path:
    {"train": [...], "valid": [...], "test": [...]}."""
    mock_data: bool = False
    """Train on generated documents whose tokens count upwards; no files are read."""
    dataset_size: int | None = None
    """With --mock-data: number of training samples to generate; a longer run repeats them in
    another order. Unset: some tens of millions of tokens."""
    split: str = "969, 30, 1"
    """Relative parts of the documents for training, validation and testing."""
    multiple_validation_sets: bool = course(False)
    """Measure each prefix of the validation and test data separately; they must have no weights."""
    full_validation: bool = course(False)
    """Use every sample of the validation data each time. For test data, --eval-iters batches are
    used in any case."""
    drop_last_partial_validation_sequence: bool = course(True)
    """Leave out the validation data after its last whole sample; otherwise it is padded to a
    sample, and the padding does not count."""
    dataloader_type: Literal["single", "cyclic", "external"] = "single"
    """single: once through the samples in order; cyclic: shuffled again every epoch of samples;
    external: a loader that the program which calls the library passes in."""
    data_sharding: bool = True
    """With cyclic: each data-parallel rank shuffles a separate share."""
    reset_position_ids: bool = False
    """Count positions from 0 again after each end of document."""
    reset_attention_mask: bool = False
    """Let no token attend to another document."""
    dataloader_inter_document_masking: bool = False
    """Let no token attend to another document, and count positions from 0 in each. Documents are
    those of the file, even if no end of document separates them."""
    create_attention_mask_in_dataloader: bool = False
    """Load the dense attention mask too, s * s bytes a sample, not only the document bounds."""
    eod_mask_loss: bool = False
    """Leave the token after each end of document out of the loss."""
    allow_ambiguous_pad_tokens: bool = False
    """Pad with the tokenizer's pad id even if it is another special id too; then every such token
    is left out of the loss."""
    mid_level_dataset_surplus: float = 0.005
    """Extra samples of each dataset of a blend, as a share of its samples by weight."""
    data_cache_path: str | None = location(None)
    """Folder or URL in which to save sample indices for later runs. Unset: they are built in
    memory. `stages.index` fills it in advance."""
    num_dataset_builder_threads: int = execution(1)
    """Number of datasets of a blend to build at the same time."""
    mmap_bin_files: bool = execution(True)
    """Map local token files into memory; otherwise they are read piece by piece."""
    object_storage_cache_path: str | None = execution(None)
    """Folder on this node for blocks of token files in an object store; all processes of a node may
    share it. Unset: the user's cache folder."""
    object_storage_cache_size_mb: int = execution(16384)
    """Limit of that folder in megabytes."""
    num_workers: int = execution(0)
    """Number of processes that load samples ahead; 0 loads them between steps."""

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        parse_split(self.split)
        self._check_one_kind()
        for flag, paths in self._paths().items():
            parse_blend(paths, flag)
        self._check_validation()
        self._check_dataset_size()
        if self.mid_level_dataset_surplus < 0:
            raise ConfigError(
                "--mid-level-dataset-surplus must be at least 0, "
                f"got {self.mid_level_dataset_surplus}"
            )
        check_at_least(self, 1, "num_dataset_builder_threads")
        check_at_least(self, 0, "num_workers")
        check_at_least(self, 64, "object_storage_cache_size_mb")
        check_at_most(self, MAX_PROCESSES, "num_dataset_builder_threads", "num_workers")

    def _check_one_kind(self) -> None:
        apart = self.train_data_path + self.valid_data_path + self.test_data_path
        kinds = {
            "--data-path": self.data_path,
            "--data-args-path": self.data_args_path,
            "--train-data-path, --valid-data-path and --test-data-path": apart,
            "--per-split-data-args-path": self.per_split_data_args_path,
            "--mock-data": self.mock_data,
        }
        given = [flag for flag, value in kinds.items() if value]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} exclude each other, as each names the data; give one"
            )
        if not given or (apart and not self.train_data_path):
            raise ConfigError(
                "--data-path is required: the prefix of a .bin/.idx pair (or --train-data-path, "
                "--data-args-path, --per-split-data-args-path, --mock-data)"
            )

    def _check_dataset_size(self) -> None:
        if self.dataset_size is None:
            return
        if not self.mock_data:
            raise ConfigError(
                "--dataset-size only applies with --mock-data; for token files, give the length of "
                "the run with --train-samples"
            )
        if self.dataset_size < 1:
            raise ConfigError(f"--dataset-size must be at least 1, got {self.dataset_size}")

    def _check_validation(self) -> None:
        if self.valid_data_split is not None:
            self._check_part(self.valid_data_split)
        for flag, asked, splits in (
            ("--multiple-validation-sets", self.multiple_validation_sets, ("valid", "test")),
            ("--full-validation", self.full_validation, ("valid",)),
        ):
            if not asked or self._reads_a_list():
                continue
            if any(has_weights(self.sources(split)) for split in splits):
                raise ConfigError(
                    f"{flag} cannot weight validation {'and test ' if 'test' in splits else ''}"
                    "data; give their prefixes without weights"
                )

    def _check_part(self, parts: str) -> None:
        begin, end = parse_split(parts, "--valid-data-split")[1]
        if begin == end:
            raise ConfigError(
                f"--valid-data-split {parts!r}: the second part is what is measured, and it is "
                "empty; enlarge it"
            )
        if not self.valid_data_path and self.per_split_data_args_path is None:
            raise ConfigError(
                "--valid-data-split divides --valid-data-path, and that is not given; for a part "
                "of --data-path, give --split"
            )

    def _reads_a_list(self) -> bool:
        return self.data_args_path is not None or self.per_split_data_args_path is not None

    def _paths(self) -> dict[str, tuple[str, ...]]:
        return {
            "--data-path": self.data_path,
            "--train-data-path": self.train_data_path,
            "--valid-data-path": self.valid_data_path,
            "--test-data-path": self.test_data_path,
        }

    def sources(self, split: str) -> list[Source]:
        """The sources of a split; empty if it has none, or for --mock-data.

        For options that name a file, call `expanded` first."""
        if self.data_path:
            return parse_blend(self.data_path, "--data-path")
        paths = {"train": self.train_data_path, "valid": self.valid_data_path}
        return parse_blend(paths.get(split, self.test_data_path), f"--{split}-data-path")

    def fractions(self, split: str) -> tuple[float, float]:
        """The part of the documents that a split takes, as bounds in [0, 1]."""
        if self.mock_data:
            return parse_split(MOCK_SPLIT)[SPLIT_NAMES.index(split)]
        if (parts := self._parts_of_valid(split)) is not None:
            return parse_split(parts)[1]
        if not self.data_path:
            return (0.0, 1.0)
        return parse_split(self.split)[SPLIT_NAMES.index(split)]

    def divided_by(self, split: str) -> str:
        """The option, with its value, that says which documents a split takes."""
        parts = self._parts_of_valid(split)
        return f"--split {self.split!r}" if parts is None else f"--valid-data-split {parts!r}"

    def _parts_of_valid(self, split: str) -> str | None:
        """--valid-data-split, where that divides the documents of a split."""
        return self.valid_data_split if split == "valid" and self.valid_data_path else None

    def expanded(self) -> DataConfig:
        """These options with the lists of --data-args-path and --per-split-data-args-path read."""
        # Imported here, as --help does not need it.
        from trainyard.datasets.data_args_file import read_list, read_lists

        if (url := self.data_args_path) is not None:
            where = f"--data-args-path {url}"
            paths: dict[str, Any] = {"data_path": read_list(url, where)}
        elif (url := self.per_split_data_args_path) is not None:
            where = f"--per-split-data-args-path {url}"
            lists = read_lists(url, where, SPLIT_NAMES)
            paths = {f"{split}_data_path": listed for split, listed in lists.items()}
        else:
            return self
        try:
            return replace(self, data_args_path=None, per_split_data_args_path=None, **paths)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Every prefix as a separate input, including those listed in a file. The weight is part of
        the name, so that a change of it is a change of the inputs."""
        if self._reads_a_list():
            return self.expanded().inputs()
        named: dict[str, tuple[str, ...]] = {}
        for kind, paths in zip(
            ("data", "train", "valid", "test"), self._paths().items(), strict=True
        ):
            for number, source in enumerate(parse_blend(paths[1], paths[0])):
                weight = "" if source.weight is None else f" (weight {source.weight!r})"
                named[f"{kind}_{number}{weight}"] = (source.prefix,)
        return named


def parse_split(split: str, flag: str = "--split") -> list[tuple[float, float]]:
    """Bounds of training, validation and test: "969, 30, 1" is 0 to 0.969, to 0.999, to 1."""
    try:
        parts = [float(part) for part in re.findall(r"[.0-9]+", split)]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or re.search(r"[^.0-9,\s]", split) or sum(parts) <= 0:
        raise ConfigError(
            f"{flag} {split!r} must be up to three numbers of at least 0, such as '969, 30, 1'"
        )
    parts += [0.0] * (3 - len(parts))
    # Summed in order in float64, as numpy does: a more exact sum splits at other documents.
    total = parts[0] + parts[1] + parts[2]
    bounds = [0.0]
    for part in parts:
        bounds.append(bounds[-1] + part / total)
    return [(bounds[0], bounds[1]), (bounds[1], bounds[2]), (bounds[2], bounds[3])]


def parse_blend(paths: Sequence[str], flag: str) -> list[Source]:
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


def has_weights(sources: Sequence[Source]) -> bool:
    """Whether any source has a weight."""
    return any(source.weight is not None for source in sources)


def _check_prefix(prefix: str, flag: str) -> None:
    if prefix.endswith((".bin", ".idx")):
        raise ConfigError(f"{flag} {prefix}: give the prefix of the pair, {prefix[:-4]}")
    if _number(prefix) is not None:
        raise ConfigError(f"{flag}: found the number {prefix} where a prefix is expected")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
