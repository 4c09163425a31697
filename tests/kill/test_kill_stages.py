"""Every stage, killed anywhere and run again, ends with the digest of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kill.yard import Yard
from tests.trainyard.collection.fetch.bad_server import BadServer
from tests.trainyard.collection.sources.warcs import Warc, html
from trainyard.artifacts.urls import join
from trainyard.testing.kill import Zygote, check_kill_anywhere
from trainyard.testing.wiki_dump import Plan, write_dump

pytestmark = [pytest.mark.kill, pytest.mark.timeout(900)]

LIGHT = ("collect", "train_tokenizer", "tokenize", "merge", "index", "plan", "report", "retro_db")
LIGHT += ("faiss_train", "faiss_add", "faiss_query", "retro_export", "retro_import")
LIGHT += ("clean", "decontaminate", "dedup", "mix", "score", "datasheet")
HEAVY = ("pretrain", "quantize", "reshard", "evaluate", "benchmark", "generate", "retro_embed")
HEAVY += ("parity",)
POINTS = {**dict.fromkeys(LIGHT, 20), **dict.fromkeys(HEAVY, 8)}

IN_BACKGROUND = ("--async-save", "--save-interval", "1", "--save-retain-interval", "4")


def kill_anywhere(
    zygote: Zygote, yard: Yard, stage: str, root: str, points: int, options: tuple[str, ...] = ()
) -> None:
    check_kill_anywhere(
        zygote,
        f"stages.{stage}",
        lambda name: [*yard.arguments(stage, join(root, name, "out")), *options],
        lambda name: yard.manifest(stage, join(root, name, "out")),
        points,
    )


@pytest.mark.parametrize("stage", POINTS)
def test_a_stage_survives_a_kill_anywhere(
    stage: str, zygote: Zygote, yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", yard.at("cache"))
    kill_anywhere(zygote, yard, stage, str(tmp_path), POINTS[stage])
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


ON_S3 = dict.fromkeys(("tokenize", "merge", "index", "retro_db"), 20)
ON_S3 |= {"pretrain": 8, "reshard": 8, "clean": 6, "decontaminate": 6, "dedup": 6, "mix": 6}
ON_S3 |= dict.fromkeys(("retro_embed", "faiss_add", "faiss_query"), 6)


@pytest.mark.parametrize("stage", ON_S3)
def test_a_stage_survives_a_kill_anywhere_on_s3(
    stage: str, zygote: Zygote, yard: Yard, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", yard.at("cache"))
    kill_anywhere(zygote, yard, stage, s3_url, ON_S3[stage])


@pytest.mark.parametrize(
    ("source", "store"),
    [
        *(("wikipedia", "file"), ("wikipedia", "s3"), ("warc", "file"), ("fetch", "file")),
        *(pytest.param(source, "s3", marks=pytest.mark.full) for source in ("warc", "fetch")),
    ],
)
def test_a_source_survives_a_kill_anywhere(
    source: str,
    store: str,
    request: pytest.FixtureRequest,
    zygote: Zygote,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    root = str(tmp_path) if store == "file" else str(request.getfixturevalue("s3_url"))
    with BadServer() as server:
        given = ["--source", source, "--workers", "1", *source_options(source, tmp_path, server)]
        check_kill_anywhere(
            zygote,
            "stages.collect",
            lambda name: [*given, "--output-dir", join(root, name, "out")],
            lambda name: join(root, name, "out", "manifest.json"),
            6 if source == "warc" or store == "s3" else 10,
        )


def source_options(source: str, folder: Path, server: BadServer) -> list[str]:
    """What a source reads: a dump with its index, a crawl, or a list of URLs."""
    if source == "wikipedia":
        dump, index = folder / "wiki.xml.bz2", folder / "wiki-index.txt.bz2"
        write_dump(dump, Plan(articles=250, words=40), index)
        return ["--input", str(dump), "--multistream-index", str(index)]
    if source == "warc":
        warc = Warc(folder / "a.warc.gz")
        for number in range(8):
            warc.response(f"https://a/{number}", html(f"Page {number}", "Words").encode())
        warc.close()
        return ["--input", str(folder / "a.warc.gz")]
    paths = [*(f"/page/{number}" for number in range(30)), "/404", "/chain/2", "/private/a"]
    (folder / "urls.txt").write_text("".join(f"{server.url(path)}\n" for path in paths))
    options = ["--input", str(folder / "urls.txt"), "--allow-private-addresses"]
    return [*options, "--host-delay-seconds", "0"]


@pytest.mark.parametrize("store", ["file", pytest.param("s3", marks=pytest.mark.full)])
def test_training_survives_a_kill_while_a_step_is_saved_in_the_background(
    store: str, request: pytest.FixtureRequest, zygote: Zygote, yard: Yard, tmp_path: Path
) -> None:
    root = str(tmp_path) if store == "file" else str(request.getfixturevalue("s3_url"))
    request.getfixturevalue("monkeypatch").setenv("TRAINYARD_CACHE", yard.at("cache"))
    kill_anywhere(zygote, yard, "pretrain", root, POINTS["pretrain"], IN_BACKGROUND)
