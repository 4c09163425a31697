"""The version of trainyard, which pyproject.toml reads, and the revision of this build."""

import os
from collections.abc import Mapping

VERSION = "0.1.0"

REVISION = "TRAINYARD_REVISION"
"""Environment variable with the source revision of this build; images set it."""

FLOW_VERSION = "TRAINYARD_FLOW_VERSION"
FLOW_REVISION = "TRAINYARD_FLOW_REVISION"
"""Environment variables that name the flow that started a stage."""


def build_revision(variables: Mapping[str, str] = os.environ, name: str = REVISION) -> str:
    """The revision of this build; empty if unknown."""
    revision = variables.get(name, "")
    return "" if revision == "unknown" else revision
