"""Options of `python -m stages.plan --retro`."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import MAX_SAMPLES, check_above_zero, check_at_most, execution, location
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroPlanConfig:
    """Estimate what each step of building Retro's neighbours takes for this many chunks: time,
    memory, disk, kind of index, nodes. From runs of the same steps on small samples."""

    retro: bool = True
    """Plan a chunk database, its index and its neighbours instead of a training."""
    retro_chunks: int
    """Chunks of the database to plan for: tokens of the corpus / 64, and half a chunk more for each
    document."""
    retro_query_chunks: int | None = None
    """Chunks of the training's samples, each of which is embedded and searched for; unset: as many
    as --retro-chunks."""
    retro_index_ntrain: int | None = None
    """Chunks that train the index; unset: 40 for each of 4 x sqrt(chunks) lists."""
    retro_measured: tuple[str, ...] = location()
    """Folders or URLs of small runs of the steps, such as PROJECT or YARD/NAME/retro: their
    manifests say what took how long. With two sizes, what a step takes whatever its size is told
    from what each chunk takes."""
    node_memory_gb: float = 256.0
    """Memory of a node, in 10^9 bytes."""
    hours: float = 24.0
    """Time that a step may take; one that can be shared is spread over nodes until it fits."""
    json: bool = execution(False)
    """Print one JSON document instead of the report."""
    output_dir: str | None = location(None)
    """Folder or URL for retro_plan.json; unset: print only."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        sizes = ("retro_chunks", "retro_query_chunks", "retro_index_ntrain")
        check_above_zero(self, *sizes)
        check_at_most(self, MAX_SAMPLES, *sizes)
        for name in ("node_memory_gb", "hours"):
            if not getattr(self, name) > 0:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be positive, got {getattr(self, name)}")
        if not self.retro_measured:
            raise ConfigError(
                "--retro-measured names no run to scale; build the neighbours of a small share of "
                "the corpus first, with retro_preprocess or flow build-retro"
            )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The measured runs."""
        return {f"measured_{i}": (url,) for i, url in enumerate(self.retro_measured)}

    def output(self) -> Output | None:
        """The folder of retro_plan.json."""
        return None if self.output_dir is None else Output.directory(self.output_dir)
