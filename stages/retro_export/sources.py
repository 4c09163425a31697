"""The parts of the project, by the options."""

from __future__ import annotations

from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.retrieval.project import CONFIG, read_project


def named_sources(project_url: str, embeddings: str | None) -> dict[str, tuple[str, ...]]:
    """URLs by the names of inputs. embeddings: for the files of guides, None for a project."""
    project = read_project(project_url)
    named = {f"{split}_neighbors": project.neighbors(split) for split in project.splits()}
    named["config"] = join(project.url, CONFIG)
    named["retro_db"] = project.database
    if store.list_files(project.index):
        named["index"] = project.index
    if embeddings is not None:
        named["embeddings"] = embeddings
    else:
        named |= {f"data_{i}": prefix for i, prefix in enumerate(project.prefixes())}
        named |= project.tokenizer_files()
        if store.list_files(project.empty_index):
            named["empty_index"] = project.empty_index
    return {name: (url,) for name, url in named.items()}
