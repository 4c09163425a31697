"""Options of `python -m stages.retro_export`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join
from trainyard.config import also, location
from trainyard.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetroExportConfig:
    """Write a project as Megatron-LM's Retro tools have it. The project is not changed."""

    retro_project_dir: str = also("retro_workdir", role="location")
    """Folder or URL of the project, with its config.json."""
    layout: Literal["project", "guides"] = "project"
    """project: the folder of a project of Megatron-LM. guides: single files under the names that
    older guides give, NAME_bert_embeddings.h5, NAME.index, NAME_neighbors_text_document.bin and
    .idx."""
    name: str = "retro"
    """NAME of these files."""
    embeddings: str | None = location(None)
    """For these files: embeddings of the database's chunks. Unset: embeddings/train of the
    project."""
    copy_data: bool = False
    """Copy the token files as well, into PROJECT/data, where Megatron-LM looks for them."""
    output_dir: str = location()
    """Folder or URL for the files."""

    def __post_init__(self) -> None:
        """Refuse what the layout does not have."""
        if not _NAME.match(self.name):
            raise ConfigError(
                f"--name {self.name!r}: the names of files begin with it, so it takes letters, "
                "digits and _ . -"
            )
        if self.layout == "guides" and self.copy_data:
            raise ConfigError("--copy-data is for --layout project; leave it out")
        if self.layout == "project" and self.embeddings is not None:
            raise ConfigError(
                "--embeddings is for --layout guides; a project of Megatron-LM keeps none"
            )

    def embeddings_url(self) -> str:
        """The folder of the embeddings of the database's chunks."""
        return self.embeddings or join(self.retro_project_dir, "embeddings", "train")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The parts of the project that are read."""
        # Imported here, as --help does not need it.
        from stages.retro_export.sources import named_sources

        guides = self.layout == "guides"
        return named_sources(self.retro_project_dir, self.embeddings_url() if guides else None)

    def output(self) -> Output:
        """The folder of the files."""
        return Output.directory(self.output_dir)
