"""A copy of a project: which files it takes, under which names, and its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainyard.artifacts import store
from trainyard.artifacts.inputs import PAIR, Manifests
from trainyard.artifacts.urls import basename, canonical, join
from trainyard.corpus.virtual import find_virtual
from trainyard.errors import ConfigError
from trainyard.retrieval.dataset_infos import INFOS, DatasetInfo
from trainyard.retrieval.hdf5 import MERGED, merged_name
from trainyard.retrieval.project import DATA, DATABASE, Project, ProjectConfig

TOKENIZER = "tokenizer"
"""Folder of the tokenizers' files in a copy."""

Files = dict[str, str]
"""URLs by their names below the new folder."""


def tokenizer_files(project: Project) -> tuple[ProjectConfig, Files]:
    """The options with new names of the tokenizers' files, and these files. A tokenizer that is a
    folder stays where it is."""
    names: dict[str, Any] = {}
    files: Files = {}
    for key, url in project.tokenizer_files().items():
        if store.exists(url):
            names[key] = f"{TOKENIZER}/{key.split('_')[1]}/{basename(url)}"
            files[names[key]] = url
        else:
            names[key] = canonical(url)
    return replace(project.config, **names), files


def token_files(project: Project, infos: Sequence[DatasetInfo]) -> Files:
    """The token files, under the names of the datasets that were cut from them. ConfigError for a
    virtual dataset, which Megatron-LM cannot read."""
    for prefix in project.prefixes():
        if find_virtual(prefix, Manifests()) is not None:
            raise ConfigError(
                f"{prefix}: a virtual dataset, which Megatron-LM cannot read; merge its parts "
                f"(python -m stages.merge --input {prefix}), and cut the database from that"
            )
    return {
        join(DATA, info.prefix + ending): prefix + ending
        for prefix, info in zip(project.prefixes(), infos, strict=True)
        for ending in PAIR
    }


def database_files(project: Project) -> Files:
    """The chunk database; blocks of single datasets only if there are any."""
    listed = store.list_files(project.database)
    blocks = sorted(name for name in listed if name.startswith("individual/"))
    names = (INFOS, *map(merged_name, MERGED), *blocks)
    return {join(DATABASE, name): join(project.database, name) for name in names}
