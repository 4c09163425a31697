"""Options of a fine-tuning for classes, under the names of Megatron-LM's tasks. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import course, location
from trainyard.datasets.config import DataConfig
from trainyard.errors import ConfigError

HEADS = ("lm_head.*", "output_layer.*", "binary_head.*")
"""Weights of a BERT that a classifier has no use for."""
NEW = ("classification_head.*", "pooler.*")
"""Weights that its checkpoint may lack; the pooler, where it has no binary head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationConfig:
    """The task and its data sets."""

    task: Literal["RACE", "MNLI", "QQP"]
    """Data set: which texts a sample has, and how many classes."""
    train_data: tuple[str, ...] = location()
    """Training sets: .tsv files of MNLI or QQP, or folders of RACE. Paths or URLs."""
    valid_data: tuple[str, ...] = location()
    """Data sets to measure after every epoch, each apart."""
    keep_last: bool = False
    """Train on the last batch of an epoch though it is not full; otherwise it is left out."""

    def __post_init__(self) -> None:
        """Refuse a training without data."""
        if not self.train_data or not self.valid_data:
            missing = "--train-data" if not self.train_data else "--valid-data"
            raise ConfigError(f"{missing} names no data set of {self.task}; give at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationData(DataConfig):
    """How samples are loaded; the data sets are --train-data and --valid-data."""

    full_validation: bool = course(True)
    """Measure every sample of the validation data each time; always on here."""

    def _check_one_kind(self) -> None:
        """Refuse token files."""
        given = [flag for flag, paths in self._paths().items() if paths]
        if given or self.data_args_path or self.per_split_data_args_path or self.mock_data:
            raise ConfigError(
                f"{given[0] if given else 'token files'}: the data of this training is named by "
                "--train-data and --valid-data; leave it out"
            )
        if self.dataloader_type != "single" or not self.full_validation:
            raise ConfigError(
                "--dataloader-type and --no-full-validation do not apply here: every epoch is "
                "shuffled, and data sets are measured whole; leave them out"
            )
