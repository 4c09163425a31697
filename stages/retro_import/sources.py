"""The parts of an old project, by the options."""

from __future__ import annotations

from collections.abc import Sequence

from trainyard.artifacts import store
from trainyard.artifacts.urls import canonical, join
from trainyard.retrieval.megatron_layout import IndexFiles, find_index
from trainyard.retrieval.project import CONFIG, Project, read_project, with_data


def open_source(url: str, data_path: Sequence[str]) -> Project:
    """The old project. data_path: instead of its token files."""
    project = read_project(url)
    moved = [canonical(prefix) for prefix in data_path]
    return with_data(project, moved) if moved else project


def source_index(project: Project, file: str | None) -> IndexFiles | None:
    """Its index; None if it has none. file: which one, if it has several."""
    return find_index(store.list_files(project.index), file, project.index)


def named_sources(project: Project, index_file: str | None) -> dict[str, tuple[str, ...]]:
    """URLs by the names of inputs."""
    named = {
        "config": join(project.url, CONFIG),
        "retro_db": project.database,
        **{f"data_{i}": prefix for i, prefix in enumerate(project.prefixes())},
        **{f"{split}_neighbors": project.neighbors(split) for split in project.splits()},
        **project.tokenizer_files(),
    }
    index = source_index(project, index_file)
    if index is not None:
        named["index"] = join(project.index, index.added)
        if store.exists(join(project.index, index.empty)):
            named["empty_index"] = join(project.index, index.empty)
    return {name: (url,) for name, url in named.items()}
