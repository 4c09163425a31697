"""Names of the datasets of a blend within a chunk database. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from trainyard.errors import ConfigError


def dataset_names(prefixes: Sequence[str]) -> list[str]:
    """A name for every prefix: its last part, or as many as distinguish all, such as `en/tokens`
    and `de/tokens`. Raises ConfigError for a prefix that occurs twice."""
    parts = [
        [part for part in prefix.split("/") if part not in ("", ".", "..")] for prefix in prefixes
    ]
    for twice in (prefix for i, prefix in enumerate(prefixes) if parts[i] in parts[:i]):
        raise ConfigError(
            f"--data-path names {twice} twice, so every chunk of it would be its own neighbour; "
            "name it once, with the sum of the weights"
        )
    for depth in count(1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def has_name(prefix: str, name: str) -> bool:
    """Whether the last parts of a prefix are the name of a dataset."""
    return f"/{prefix.strip('/')}".endswith(f"/{name}")
