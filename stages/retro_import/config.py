"""Options of `python -m stages.retro_import`."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.artifacts.output import Output
from trainyard.config import also, location


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroImportConfig:
    """Make a project of ours from one that Megatron-LM's Retro tools built: database, index,
    neighbours. Everything is checked; the old project is not changed."""

    retro_project_dir: str = also("retro_workdir", role="location")
    """Folder or URL of the old project, with its config.json."""
    retro_gpt_data_path: tuple[str, ...] = location(())
    """Where the token files are now, without weights, in the order of config.json. Unset: where
    config.json says."""
    retro_index_file: str | None = None
    """The filled index below PROJECT/index, such as
    faiss-par-add/IVF4096,PQ32/added_0.970_0.950.faissindex; needed if there are several."""
    copy_data: bool = False
    """Copy the token files as well, into PROJECT/data."""
    output_dir: str = location()
    """Folder or URL of the new project."""

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The parts of the old project that are read, its token files and tokenizers."""
        # Imported here, as --help does not need it.
        from stages.retro_import.sources import named_sources, open_source

        project = open_source(self.retro_project_dir, self.retro_gpt_data_path)
        return named_sources(project, self.retro_index_file)

    def output(self) -> Output:
        """The folder of the new project."""
        return Output.directory(self.output_dir)
