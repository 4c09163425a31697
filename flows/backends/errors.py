"""That who runs jobs does not answer: a Docker engine, a controller of Slurm, the API server of a
cluster."""

from __future__ import annotations

from trainyard.errors import InfrastructureError


class BackendUnavailableError(InfrastructureError):
    """Nobody answered for as long as a block asks again. A job that is there may go on meanwhile,
    so this says nothing of it."""
