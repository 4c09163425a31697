"""The report stage: a self-contained page of what the artifacts say, with or without them all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stages.report.card import OF_SPLIT, render
from stages.report.collect import options_of
from stages.report.config import ReportConfig
from stages.report.facts import Card, Option, Sample
from stages.report.lineage import Ancestry, Artifact, Lineage, grouped
from stages.report.run import run
from stages.report.steps import Step, Steps
from tests.stages.directly import run_directly
from tests.stages.html_page import Page, check_sound
from trainyard.artifacts import store
from trainyard.artifacts.inputs import resolve
from trainyard.artifacts.manifest import InputRecord, Manifest, publish, read_manifest
from trainyard.artifacts.output import Output
from trainyard.charts.markup import printable
from trainyard.config import from_dict
from trainyard.errors import ArtifactError, ConfigError

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>\' & \x00\ud800'

# --- a run without training anything ----------------------------------------------------------


def make(
    output: Output,
    stage: str,
    files: dict[str, str],
    inputs: Mapping[str, tuple[str, ...]] | None = None,
    **rest: Any,
) -> None:
    """Publish an artifact of a few small files, as a stage would."""
    records = tuple(
        store.write_bytes(output.file_url(name), text.encode(), name, name.startswith("timings"))
        for name, text in files.items()
    )
    found = {name: resolve(name, urls) for name, urls in (inputs or {}).items()}
    manifest = Manifest(
        stage=stage,
        files=records,
        inputs={name: InputRecord(i.urls, i.digest) for name, i in found.items()},
        run={"seconds": 2.5, "started": "2026-01-02T03:04:05Z", "python": "3.11.7"},
        code={"version": "0.1.0", "digest": "c0de"},
        **rest,
    )
    standing = read_manifest(output.manifest_url)
    publish(output.manifest_url, manifest, standing[1] if standing else None)


def ledger(num_steps: int = 6) -> str:
    lines: list[dict[str, Any]] = [
        {"step": 0, "consumed_train_samples": 0, "tokens": 0, "validation_loss": 8.0}
    ]
    for step in range(1, num_steps + 1):
        lines.append(
            {"step": step, "tokens": 64 * step, "lm_loss": 8.0 - 0.5 * step, "grad_norm": 1.0}
            | {"learning_rate": 1e-3 / step}
            | ({"validation_loss": 5.0} if step == num_steps else {})
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


MODEL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16}
REQUEST = {"prompt": "The yard", "generated_output": " is <b>full</b>", "finish_reason": "stop"}
TIMING = {"id": 0, "num_input_tokens": 2, "num_output_tokens": 3, "tpot": [0.1], "latency": 0.2}


def make_run(root: str) -> dict[str, str]:
    """A small yard; returns the options that name its artifacts."""
    at: Callable[..., str] = lambda *parts: store.join(root, *parts)  # noqa: E731
    shards = [f"train-{i}.jsonl" for i in range(3)]
    texts = {name: f'{{"text": "{name}"}}\n' for name in shards} | {"heldout.txt": "words\n"}
    make(Output.directory(at("corpus")), "collect", texts)
    corpus = tuple(at("corpus", name) for name in shards)
    tokenizer = Output.directory(at("tokenizer"))
    make(tokenizer, "train_tokenizer", {"tokenizer.json": "{}"}, {"input": corpus})
    for name, url in zip(shards, corpus, strict=True):
        part = Output.prefix(at("tokens", "parts", name.removesuffix(".jsonl")))
        inputs = {"input": (url,), "tokenizer": (at("tokenizer"),)}
        make(part, "tokenize", {"_text_document.bin": name}, inputs)
    tokens = at("tokens", "corpus_text_document")
    parts = {"input": (at("tokens", "parts"),)}
    make(Output.prefix(tokens), "merge", {".bin": "b", ".idx": "i"}, parts)
    files = {
        "ledger.jsonl": ledger(),
        "timings.jsonl": '{"step": 1, "tokens_per_second": 640.0}\n',
        "iter_0000006/config.json": json.dumps({"model": MODEL, "padded_vocab_size": 128}),
    }
    trained_from = {"data_0": (tokens,), "tokenizer": (at("tokenizer"),)}
    options = {"num_layers": 2, "swiglu": True, "clip_grad": 1.0, "finetune": False}
    checkpoint = Output.directory(at("checkpoint"))
    make(checkpoint, "pretrain", files, trained_from, config=options, metrics={"device": "cpu"})
    loads = {"load": (at("checkpoint"),)}
    make(Output.directory(at("export")), "reshard", {"model.safetensors": "x"}, loads)
    memory = {"memory_bytes": {"total": 3e6}, "parameters": {"exact": 9}}
    make(Output.directory(at("plan")), "plan", {"plan.json": json.dumps(memory)})
    results = {"task": "WIKITEXT103", "avg_loss": 5.1, "ppl": 164.0}
    held_out = {**loads, "valid_data": (at("corpus", "heldout.txt"),)}
    evaluation = Output.directory(at("evaluation"))
    make(evaluation, "evaluate", {"results.json": json.dumps(results)}, held_out)
    generations = {"sampling": {"temperature": 0.0}, "requests": [REQUEST] * 4}
    figures = {"device": "cpu", "tokens_per_second": 50.0, "requests": [TIMING]}
    files = {"generations.json": json.dumps(generations), "timings.json": json.dumps(figures)}
    make(Output.directory(at("benchmark")), "benchmark", files, loads)
    names = ("corpus", "tokenizer", "plan", "checkpoint", "export", "evaluation", "benchmark")
    return {name: at(name) for name in names} | {"tokens": tokens}


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINYARD_CACHE", str(tmp_path_factory.mktemp("cache")))
        return make_run(str(tmp_path_factory.mktemp("yard") / "first"))


def report(out: Path, **options: Any) -> tuple[Page, dict[str, Any]]:
    run_directly(ReportConfig, run, output_prefix=str(out / "card"), **options)
    page = check_sound((out / "card.html").read_text("utf-8"))
    return page, json.loads((out / "card.summary.json").read_text())


def lineage_of(**urls: str) -> Lineage:
    ancestry = Ancestry()
    keys = {name: ancestry.add(url) for name, url in urls.items()}
    return ancestry.lineage(keys["checkpoint"])


def named_edges(lineage: Lineage) -> set[tuple[str, str]]:
    names = {artifact.key: artifact.label for artifact in lineage.artifacts}
    return {(names[a], names[b]) for a, b in lineage.edges}


# --- the page ---------------------------------------------------------------------------------


def test_page_of_a_whole_run_shows_every_part(yard: dict[str, str], tmp_path: Path) -> None:
    page, _ = report(tmp_path, **yard)
    assert list(page.sections) == [
        "",
        "Training",
        "Where it came from",
        "What it writes",
        "How good, how fast",
        "Where the time went",
        "What was run",
    ]
    head = page.sections[""]
    assert f"trainyard run card \u00b7 {tmp_path.name}" in head.text
    assert head.text.count("trained on 384 tokens in 2.5 s") == 1
    assert ["Validation loss", "8.00 \u2192 5.00", "3.00 nats lower"] in head.rows
    assert ["Tokens seen", "384", "in 6 steps"] in head.rows
    assert ["Training speed", "640", "tokens/s, median"] in head.rows
    assert ["6", "5.000", "5.000"] in page.sections["Training"].rows
    texts = page.sections["What it writes"].text
    assert texts.count("The yard is <b>full</b> end of document") == 4
    assert "prompts;" not in texts
    assert "The most likely token at each step." in texts
    perplexities = ["Validation perplexity", "2 981 \u2192 148"]
    assert [*perplexities, f"before and after, {OF_SPLIT}"] in head.rows
    assert "heldout.txt, by the protocol of WIKITEXT103" in page.sections["How good, how fast"].text
    assert page.sections["How good, how fast"].facts == {
        "perplexity, per token": "164",
        "loss, nats per token": "5.1000",
        "output tokens per second": "50.0",
    }
    assert ["0", "2", "3", "100 ms", "200 ms"] in page.sections["How good, how fast"].rows
    assert ["pretrain", "", "2.5 s", "9%"] in page.sections["Where the time went"].rows
    facts = page.sections["What was run"].facts
    assert facts["--swiglu"] == "no \u2192 yes"
    assert facts["parameters"] == "9"
    assert facts["memory, in all"] == "3.00 MB"
    assert facts["device"] == "CPU"


def test_table_has_every_artifact_with_its_digest(yard: dict[str, str], tmp_path: Path) -> None:
    page, summary = report(tmp_path, **yard)
    rows = {row[0]: row[1:] for row in page.sections["Where it came from"].rows}
    assert rows["pretrain"][0] == summary["artifacts"]["checkpoint"]
    assert rows["pretrain"][2:] == ["3", "2.5 s", "2026-01-02 03:04:05 UTC", yard["checkpoint"]]
    assert rows["tokenize \u00d73"][2] == "3"


def test_page_of_a_checkpoint_alone_is_shorter(yard: dict[str, str], tmp_path: Path) -> None:
    page, summary = report(tmp_path, checkpoint=yard["checkpoint"])
    assert {"What it writes", "How good, how fast"}.isdisjoint(page.sections)
    assert "Planned" not in page.sections["What was run"].text
    assert "merge" in page.sections["Where it came from"].text  # its lineage is still known
    assert summary.keys() == {"format_version", "artifacts", "parameters", "training"}


def test_every_visible_svg_has_a_title(yard: dict[str, str], tmp_path: Path) -> None:
    page, _ = report(tmp_path, **yard)
    ids = {attributes.get("id") for _, attributes in page.tags}
    pictures = [a for tag, a in page.tags if tag == "svg" and a.get("role") == "img"]
    assert len(pictures) == 5  # loss, rate, norm, speed, lineage
    assert all(picture["aria-labelledby"] in ids for picture in pictures)


def test_parts_are_one_node_with_a_digest_that_ignores_their_order() -> None:
    parts = [Artifact(key=f"parts/{n}", stage="tokenize", digest=str(n)) for n in range(3)]
    merged = Artifact(key="all", stage="merge", digest="m")
    edges = [(part.key, "all") for part in parts]
    first = grouped([*parts, merged], edges, "all")
    assert grouped([*reversed(parts), merged], edges, "all") == first
    assert [one.key for one in first.artifacts] == ["parts/0 ... 2", "all"]


def hostile_card(text: str) -> Card:
    artifact = Artifact(key=text, stage=text, digest=text, seconds=1.0, config={text: text})
    checkpoint = Artifact(key="c", stage="pretrain", digest=text, started=text)
    return Card(
        title=text,
        lineage=Lineage(artifacts=(artifact, checkpoint), edges=((text, "c"),), destination="c"),
        options=(Option(name=text, value=[text]),),
        environment=((text, text),),
        evaluation={"task": text, text: text},
        timings={"device": text, "tokens_per_second": 1.0},
        samples=(Sample(prompt=text, continuation=text),),
    )


def test_hostile_text_stays_text() -> None:
    page = render(hostile_card(HOSTILE))
    parsed = check_sound(page)
    page.encode()  # no half of a surrogate pair, no zero byte
    assert "\0" not in page
    shown = printable(HOSTILE)
    for section in ("", "What it writes", "How good, how fast", "What was run"):
        assert shown in parsed.sections[section].text
    assert "prefers-color-scheme: dark" in page
    policy = [a["content"] for _, a in parsed.tags if "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


CHECKPOINT = Artifact(key="c", stage="pretrain", digest="d")
LINEAGE = Lineage(artifacts=(CHECKPOINT,), edges=(), destination="c")


def page_of(**facts: Any) -> Page:
    return check_sound(render(Card(title="t", lineage=LINEAGE, **facts)))


def test_a_page_of_only_a_checkpoint_is_valid() -> None:
    assert list(page_of().sections) == ["", "Where it came from"]
    page = page_of(steps=Steps([Step(step=1, loss=2.0, tokens=0)]))
    assert ["Training loss", "2.000", "at the last step"] in page.sections[""].rows


def test_headline_says_what_validation_was_measured() -> None:
    steps = [Step(step=n, validation_loss=9.0 - n / 10) for n in (0, 10, 20)]
    assert "before and after" in page_of(steps=Steps(steps)).sections[""].text
    assert "first at step 10" in page_of(steps=Steps(steps[1:])).sections[""].text
    assert "at step 20" in page_of(steps=Steps(steps[2:])).sections[""].text


def test_options_have_their_defaults() -> None:
    options = options_of({"num_layers": 2, "swiglu": True, "clip_grad": 1.0, "finetune": False})
    assert [option.name for option in options if option.differs] == ["num_layers", "swiglu"]


# --- the summary ------------------------------------------------------------------------------


def test_the_summary_does_not_depend_on_place_or_time(tmp_path: Path) -> None:
    summaries = []
    for place in ("one", "another"):
        options = make_run(str(tmp_path / place))
        (tmp_path / place / "out").mkdir()
        report(tmp_path / place / "out", **options)
        summaries.append((tmp_path / place / "out" / "card.summary.json").read_bytes())
    assert summaries[0] == summaries[1]


def test_the_summary_has_the_results_of_the_run(yard: dict[str, str], tmp_path: Path) -> None:
    _, summary = report(tmp_path, **yard)
    assert summary["training"]["steps"] == 6
    assert summary["training"]["tokens"] == 384
    assert summary["training"]["validation_before"]["loss"] == 8.0
    assert summary["training"]["validation_after"]["perplexity"] == math.exp(5.0)
    assert summary["evaluation"]["ppl"] == 164.0
    assert summary["parameters"] > 0
    assert summary["artifacts"].keys() == yard.keys()
    assert len(summary["samples"]) == 4


def test_prompts_that_are_left_out_are_counted(yard: dict[str, str], tmp_path: Path) -> None:
    page, _ = report(tmp_path, **yard, num_samples=3)
    texts = page.sections["What it writes"].text
    assert texts.count("The yard is <b>full</b> end of document") == 3
    assert "The first 3 of 4 prompts; --num-samples shows up to 12." in texts


@pytest.mark.slow
@pytest.mark.s3
def test_lineage_is_the_same_on_s3(yard: dict[str, str], s3_url: str, tmp_path: Path) -> None:
    remote = make_run(s3_url)
    here = lineage_of(checkpoint=yard["checkpoint"], evaluation=yard["evaluation"])
    there = lineage_of(checkpoint=remote["checkpoint"], evaluation=remote["evaluation"])
    assert named_edges(there) == named_edges(here)
    assert report(tmp_path, **remote)[1] == report(tmp_path, **yard)[1]


# --- lineage ----------------------------------------------------------------------------------


def test_the_lineage_reaches_the_corpus_and_merges_similar_parts(yard: dict[str, str]) -> None:
    lineage = lineage_of(checkpoint=yard["checkpoint"], evaluation=yard["evaluation"])
    assert named_edges(lineage) == {
        ("collect", "train tokenizer"),
        ("collect", "tokenize \u00d73"),
        ("train tokenizer", "tokenize \u00d73"),
        ("tokenize \u00d73", "merge"),
        ("merge", "pretrain"),
        ("train tokenizer", "pretrain"),
        ("pretrain", "evaluate"),
        ("collect", "evaluate"),
    }


def test_lineage_of_raw_files_ends_in_one_source(tmp_path: Path) -> None:
    raw = [tmp_path / f"{i}.jsonl" for i in range(3)]
    for path in raw:
        path.write_text("{}\n")
        output = Output.prefix(str(tmp_path / "parts" / path.stem))
        make(output, "tokenize", {".bin": path.name}, {"input": (str(path),)})
    merged = Output.prefix(str(tmp_path / "all"))
    make(merged, "merge", {".bin": "x"}, {"input": (str(tmp_path / "parts"),)})
    lineage = lineage_of(checkpoint=merged.url)
    times = "\u00d73"
    assert named_edges(lineage) == {
        (f"source {times}", f"tokenize {times}"),
        (f"tokenize {times}", "merge"),
    }
    assert next(a for a in lineage.artifacts if not a.stage).size_bytes == 9


def test_an_artifact_rebuilt_later_is_not_the_origin(tmp_path: Path) -> None:
    tokens, checkpoint = (Output.directory(str(tmp_path / name)) for name in ("tokens", "run"))
    make(tokens, "merge", {"a.bin": "before"})
    make(checkpoint, "pretrain", {"w": "x"}, {"data": (tokens.url,)})
    make(tokens, "merge", {"a.bin": "after"})
    lineage = lineage_of(checkpoint=checkpoint.url)
    assert named_edges(lineage) == {("earlier tokens", "pretrain")}


def test_a_step_of_a_run_stands_for_the_run(tmp_path: Path) -> None:
    run_folder = Output.directory(str(tmp_path / "run"))
    step = Output.directory(str(tmp_path / "run" / "iter_0000006"))
    make(step, "pretrain", {"index.json": "{}"})
    make(run_folder, "pretrain", {"iter_0000006/index.json": "{}"})
    ancestry = Ancestry()
    assert ancestry.add(step.url) == run_folder.url


# --- refusals ---------------------------------------------------------------------------------


def test_a_broken_ledger_is_named_with_its_line(tmp_path: Path) -> None:
    output = Output.directory(str(tmp_path / "run"))
    make(output, "pretrain", {"ledger.jsonl": '{"step": 1}\n{"st\n'})
    with pytest.raises(ArtifactError, match=r"ledger\.jsonl: line 2"):
        report(tmp_path, checkpoint=output.url)


def test_a_checkpoint_without_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "weights").write_text("x")
    with pytest.raises(ArtifactError, match=r"no manifest\.json"):
        report(tmp_path, checkpoint=str(tmp_path / "run"))


@pytest.mark.parametrize("name", ["tokenizer", "benchmark", "tokens"])
def test_other_artifacts_are_refused(yard: dict[str, str], tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--checkpoint .*: made by \w+, so there is no training"):
        report(tmp_path, checkpoint=yard[name])
    assert not (tmp_path / "card.html").exists()


def test_reshard_or_folder_of_a_step_is_accepted(yard: dict[str, str], tmp_path: Path) -> None:
    report(tmp_path / "export", checkpoint=yard["export"])
    run_folder = Output.directory(str(tmp_path / "elsewhere"))
    make(run_folder, "finetune", {"iter_0000006/index.json": "{}"})
    report(tmp_path / "step", checkpoint=run_folder.url)


def test_too_many_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="num-samples"):
        from_dict(ReportConfig, {"checkpoint": "c", "output_prefix": "p", "num_samples": 99})
