"""How large a model the files of others may describe, asked before a name of it is built.

A number is written in ten bytes, and what follows from it, a name for every tensor, may fill any
memory. No real model comes near these bounds; within them, the tensors that are there decide."""

from __future__ import annotations

from trainyard.errors import ArtifactError
from trainyard.models.config import MAX_LAYERS, MAX_PARAMS, TransformerConfig


def check_layers(num_layers: int, where: str) -> int:
    """The number, unless it is too large. Raises ArtifactError by the document's name."""
    if num_layers > MAX_LAYERS:
        raise ArtifactError(f"{where}: says {num_layers} layers; {MAX_LAYERS} are read at most")
    return num_layers


def check_model(config: TransformerConfig, rows: int, num_tensors: int, where: str) -> None:
    """Refuse a model that cannot be that of the `num_tensors` tensors which lie there.

    rows: of the embedding. where: what describes the model, for messages."""
    check_layers(config.num_layers, where)
    if config.num_layers > num_tensors:
        raise ArtifactError(
            f"{where}: says {config.num_layers} layers, and there are {num_tensors} tensors; some "
            "files are missing, or it is of another model"
        )
    if config.num_params(rows) > MAX_PARAMS:
        raise ArtifactError(
            f"{where}: describes a model of {config.num_params(rows):.1e} parameters; "
            f"{MAX_PARAMS:.0e} are read at most"
        )
