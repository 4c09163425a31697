"""Every stage, killed anywhere and run again, ends with the digest of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kill.yard import Yard
from trainyard.artifacts.urls import join
from trainyard.testing.kill import Zygote, check_kill_anywhere

pytestmark = [pytest.mark.kill, pytest.mark.timeout(900)]

LIGHT = ("collect", "train_tokenizer", "tokenize", "merge", "index", "plan", "report", "retro_db")
LIGHT += ("faiss_train", "faiss_add", "faiss_query", "retro_export", "retro_import")
LIGHT += ("clean", "decontaminate", "dedup", "mix", "datasheet")
HEAVY = ("pretrain", "reshard", "evaluate", "benchmark", "generate", "retro_embed")
POINTS = {**dict.fromkeys(LIGHT, 20), **dict.fromkeys(HEAVY, 8)}

IN_BACKGROUND = ("--async-save", "--save-interval", "1", "--save-retain-interval", "4")


def kill_anywhere(
    zygote: Zygote, yard: Yard, stage: str, root: str, options: tuple[str, ...] = ()
) -> None:
    check_kill_anywhere(
        zygote,
        f"stages.{stage}",
        lambda name: [*yard.arguments(stage, join(root, name, "out")), *options],
        lambda name: yard.manifest(stage, join(root, name, "out")),
        POINTS[stage],
    )


@pytest.mark.parametrize("stage", POINTS)
def test_a_stage_survives_a_kill_anywhere(
    stage: str, zygote: Zygote, yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", yard.at("cache"))
    kill_anywhere(zygote, yard, stage, str(tmp_path))
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


@pytest.mark.parametrize("stage", ["tokenize", "merge", "index", "retro_db", "pretrain", "reshard"])
def test_a_stage_survives_a_kill_anywhere_on_s3(
    stage: str, zygote: Zygote, yard: Yard, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", yard.at("cache"))
    kill_anywhere(zygote, yard, stage, s3_url)


@pytest.mark.parametrize("store", ["file", pytest.param("s3", marks=pytest.mark.full)])
def test_training_survives_a_kill_while_a_step_is_saved_in_the_background(
    store: str, request: pytest.FixtureRequest, zygote: Zygote, yard: Yard, tmp_path: Path
) -> None:
    root = str(tmp_path) if store == "file" else str(request.getfixturevalue("s3_url"))
    request.getfixturevalue("monkeypatch").setenv("TRAINYARD_CACHE", yard.at("cache"))
    kill_anywhere(zygote, yard, "pretrain", root, IN_BACKGROUND)
