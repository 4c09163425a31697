"""The version of trainyard; pyproject.toml reads it from here. And of which build it is."""

import os
from collections.abc import Mapping

VERSION = "0.1.0"

REVISION = "TRAINYARD_REVISION"
"""Variable with the revision of the sources that this was built from; images set it."""

FLOW_VERSION = "TRAINYARD_FLOW_VERSION"
FLOW_REVISION = "TRAINYARD_FLOW_REVISION"
"""Variables that tell a stage who chose its options."""


def build_revision(variables: Mapping[str, str] = os.environ, name: str = REVISION) -> str:
    """The revision of this build; empty where nobody has told it."""
    told = variables.get(name, "")
    return "" if told == "unknown" else told
