"""Bounds on the model that a file may describe, checked before names of its tensors are built.

A file states a number in ten bytes, but a name for every tensor may fill any memory. Real models
are far below these bounds; within them, the stored tensors decide."""

from __future__ import annotations

from trainyard.errors import ArtifactError
from trainyard.models.config import TransformerConfig
from trainyard.models.config_checks import MAX_LAYERS, MAX_PARAMS


def check_layers(num_layers: int, where: str) -> int:
    """The number of layers. Raises ArtifactError, which names the document, if it is too large."""
    if num_layers > MAX_LAYERS:
        raise ArtifactError(f"{where}: says {num_layers} layers; {MAX_LAYERS} are read at most")
    return num_layers


def check_model(config: TransformerConfig, rows: int, num_tensors: int, where: str) -> None:
    """Raise ArtifactError for a model that cannot have just `num_tensors` tensors.

    rows: of the embedding. where: the document that describes the model, for messages."""
    check_layers(config.num_layers, where)
    num_layers = config.all_layers + config.num_inner_layers(range(config.num_layers))
    if num_layers > num_tensors:
        raise ArtifactError(
            f"{where}: says {num_layers} layers, and there are {num_tensors} tensors; some "
            "files are missing, or it is of another model"
        )
    if config.num_params(rows) > MAX_PARAMS:
        raise ArtifactError(
            f"{where}: describes a model of {config.num_params(rows):.1e} parameters; "
            f"{MAX_PARAMS:.0e} are read at most"
        )
