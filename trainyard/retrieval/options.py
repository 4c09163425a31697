"""Options of a training with neighbours: where they are. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainyard.config import flag, location
from trainyard.errors import ConfigError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalConfig:
    """The chunk database and the tables of neighbours of a training with --model-type retro."""

    retro_project_dir: str | None = location(None)
    """Folder or URL of a Retro project, which holds the database and the tables. --data-path and
    all options that decide the samples must be as in its config.json."""
    retro_db: str | None = location(None)
    """Folder or URL of the chunk database, the output of retro_db; unset: that of the project."""
    retro_db_data_path: tuple[str, ...] = location(())
    """Prefixes of the token files that the database was made from, in its order; unset: those of
    --data-path."""
    retro_train_neighbors: str | None = location(None)
    """Neighbours of the training samples, the output of faiss_query; unset: those of the
    project."""
    retro_valid_neighbors: str | None = location(None)
    """Neighbours of the validation samples; needed unless --eval-iters is 0."""
    retro_test_neighbors: str | None = location(None)
    """Neighbours of the test samples; without them there is no test loss at the end."""
    retro_loaded_database: str | None = None
    """To continue with another chunk database: the digest of the one that --load was trained
    with."""

    def __post_init__(self) -> None:
        """Refuse options without those that they need."""
        if self.retro_project_dir is not None:
            return
        needed = ("retro_db", "retro_train_neighbors")
        given = [name for name in self.__dataclass_fields__ if getattr(self, name)]
        missing = [flag(name) for name in needed if not getattr(self, name)]
        if given and missing:
            raise ConfigError(
                f"{flag(given[0])} needs {' and '.join(missing)}, or --retro-project-dir"
            )

    @property
    def is_given(self) -> bool:
        """Whether there are neighbours."""
        return self.retro_db is not None or self.retro_project_dir is not None

    def may_have(self, split: str) -> bool:
        """Whether the options name a table of a split, or a project that may."""
        return self.retro_project_dir is not None or self.neighbors_of(split) is not None

    def neighbors_of(self, split: str) -> str | None:
        """The table of a split: train, valid or test. For a project, call `located` first."""
        url: str | None = getattr(self, f"retro_{split}_neighbors")
        return url

    def located(self) -> RetrievalConfig:
        """These options with what the project has. Raises ConfigError or ArtifactError for a
        project that cannot be read."""
        if self.retro_project_dir is None:
            return self
        # Imported here, as --help does not need it.
        from trainyard.retrieval.project import read_project

        project = read_project(self.retro_project_dir)
        tables = {
            f"retro_{split}_neighbors": self.neighbors_of(split) or project.neighbors(split)
            for split in SPLITS
            if project.has_neighbors(split) or split == "train"
        }
        return replace(
            self,
            retro_db=self.retro_db or project.database,
            retro_db_data_path=self.retro_db_data_path or tuple(project.prefixes()),
            **tables,
        )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The database and each table."""
        found = self.located()
        named = {"retro_db": found.retro_db} | {
            f"retro_{split}_neighbors": found.neighbors_of(split) for split in SPLITS
        }
        tables = {name: (url,) for name, url in named.items() if url is not None}
        # The database may be cut from more than the run's own data.
        chunks = {f"retro_db_data_{i}": (p,) for i, p in enumerate(found.retro_db_data_path)}
        return {**tables, **chunks}
