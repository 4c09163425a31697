"""A small yard for the kill-anywhere checks: every stage run once, undisturbed, on real text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kill.yard import Yard
from trainyard.testing.kill import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    modules = ("collect", "train_tokenizer", "tokenize", "merge", "index", "plan", "report")
    modules += ("pretrain", "reshard", "evaluate", "benchmark")
    modules += ("faiss_train", "faiss_add", "faiss_query", "retro_embed")
    modules += ("retro_export", "retro_import", "clean", "decontaminate", "dedup")
    modules += ("mix", "datasheet")
    with Zygote("s3fs", *(f"stages.{name}.run" for name in modules)) as process:
        yield process


@pytest.fixture(scope="session")
def yard(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Yard:
    root: Path = tmp_path_factory.mktemp("yard")
    made = Yard(str(root))
    os.environ["TRAINYARD_CACHE"] = str(root / "cache")
    made.prepare(zygote)
    return made
