"""An output may not overwrite what the stage reads, and nothing else is refused."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from stages.merge.config import MergeConfig
from stages.runtime.up_to_date import CODE_FILES, decide, refuse_overlap
from stages.tokenize.config import TokenizeConfig
from trainyard.artifacts import store
from trainyard.artifacts.inputs import Input
from trainyard.artifacts.manifest import Manifest, publish, read_slot, retire
from trainyard.artifacts.output import Output
from trainyard.errors import ArtifactError, ConfigError
from trainyard.tokenizers.config import TokenizerConfig


def tokenize(root: Path, input: str, prefix: str, **options: object) -> str | None:
    """Why a run would be made; files that do not exist yet are made first."""
    name = root / input
    if not any(mark in input for mark in "*?") and not name.exists():
        store.write_bytes(str(name), b'{"text": "a"}\n')
    config = TokenizeConfig(
        input=(str(name),),
        output_prefix=str(root / prefix),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10),
        **options,  # type: ignore[arg-type]
    )
    return decide("tokenize", config, ["stages.runtime.up_to_date"], force=False).reason


@pytest.mark.parametrize(
    ("input", "prefix"),
    [("a.jsonl", "a"), ("a_b.jsonl", "a"), ("a.b.jsonl", "a"), ("a.worker.jsonl", "a")],
)
def test_an_input_may_start_with_the_prefix_of_the_output(
    tmp_path: Path, input: str, prefix: str
) -> None:
    assert tokenize(tmp_path, input, prefix) == "there is no manifest yet"
    assert tokenize(tmp_path, input, prefix, rank=0, world_size=2) == "there is no manifest yet"
    pattern = input.replace("jsonl", "js*l")
    assert tokenize(tmp_path, pattern, prefix, on_bad_line="skip") == "there is no manifest yet"


@pytest.mark.parametrize(
    ("input", "options"),
    [
        ("a_text_document.bin", {}),
        ("a_body_document.docs", {"json_keys": ("text", "body")}),
        ("a.manifest.json", {}),
        ("a.claim.json", {}),
        ("a.work/1.jsonl", {}),
        ("a.shares/1.jsonl", {}),  # goes when shares are joined
        ("a.bad_lines.jsonl", {"on_bad_line": "skip"}),
    ],
)
def test_an_output_that_overwrites_an_input_is_refused(
    tmp_path: Path, input: str, options: dict[str, object]
) -> None:
    with pytest.raises((ConfigError, ArtifactError), match=r"would overwrite|not a manifest"):
        tokenize(tmp_path, input, "a", **options)


def test_an_output_that_matches_the_input_pattern_is_refused(tmp_path: Path) -> None:
    store.write_bytes(str(tmp_path / "x.jsonl"), b"{}\n")
    with pytest.raises(ConfigError, match="would overwrite"):
        tokenize(tmp_path, "*", "a")
    with pytest.raises(ConfigError, match="would overwrite"):
        tokenize(tmp_path, "*.jsonl", "a", on_bad_line="skip")
    assert tokenize(tmp_path, "*.jsonl", "a")
    assert tokenize(tmp_path, "*.jsonl", "below/a", on_bad_line="skip")
    with pytest.raises(ConfigError, match="would lie in"):
        tokenize(tmp_path, ".", "below/a")


def test_files_that_a_run_will_remove_are_refused_as_inputs(tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    record = store.write_bytes(prefix + "_old.jsonl", b"{}\n", "_old.jsonl")
    publish(prefix + ".manifest.json", Manifest(stage="tokenize", files=(record,)), None)
    with pytest.raises(ConfigError, match="would overwrite"):
        tokenize(tmp_path, "a_old.jsonl", "a")


def test_a_run_that_was_killed_while_replacing_resumes(tmp_path: Path) -> None:
    tokenize(tmp_path, "a.jsonl", "a")
    prefix = str(tmp_path / "a")
    record = store.write_bytes(prefix + "_old.bin", b"{}\n", "_old.bin")
    publish(prefix + ".manifest.json", Manifest(stage="tokenize", files=(record,)), None)
    slot = read_slot(prefix + ".manifest.json")
    assert slot is not None
    retire(prefix + ".manifest.json", slot, "a run")
    assert tokenize(tmp_path, "a.jsonl", "a") == "a run that was replacing it did not finish"
    for name in ("a_old.bin", "a_new.bin"):  # what it replaces, and what it made so far
        store.write_bytes(str(tmp_path / "a.work/final-1.json"), b'["_new.bin"]')
        with pytest.raises(ArtifactError, match="has not finished"):
            tokenize(tmp_path, name, "b")


@dataclass
class Other:
    """A stage that does not tell the names it writes."""

    input: str
    to: Output

    def inputs(self) -> dict[str, tuple[str, ...]]:
        return {"input": (self.input,)}

    def output(self) -> Output:
        return self.to


def test_without_declared_names_any_file_with_the_prefix_is_refused(tmp_path: Path) -> None:
    prefix, folder = Output.prefix(str(tmp_path / "a")), Output.directory(str(tmp_path / "f"))
    for name, output in (("a.bin", prefix), ("a_b.idx", prefix), ("f/x", folder)):
        store.write_bytes(str(tmp_path / name), b"1")
        with pytest.raises(ConfigError, match="would overwrite"):
            decide(
                "x", Other(str(tmp_path / name), output), ["stages.runtime.up_to_date"], force=False
            )


@pytest.mark.slow
def test_twenty_thousand_listed_files_are_checked_quickly(tmp_path: Path) -> None:
    files = tuple(str(tmp_path / f"in/{i % 7}/{i}.jsonl") for i in range(20_000))
    inputs = {"input": Input("input", files, files, "digest")}
    output = Output.prefix(str(tmp_path / "in/out"), ["_text_document.bin"])
    began = time.process_time()
    refuse_overlap(output, None, inputs)
    assert time.process_time() - began < 0.8  # it takes a tenth of a second
    last = replace(inputs["input"], files=(*files, str(tmp_path / "in/out.work/a")))
    with pytest.raises(ConfigError, match=r"would overwrite the input \(.*in/out.work/a\)"):
        refuse_overlap(output, None, {"input": last})
    folder = Input("input", (str(tmp_path / "in/3"),), files, "digest")
    within = Output.directory(str(tmp_path / "in/3/out"))
    with pytest.raises(ConfigError, match=r"would lie in the input \(.*in/3\)"):
        refuse_overlap(within, None, {"input": folder})


# --- the code ---------------------------------------------------------------------------------


def test_a_change_of_code_names_the_files(tmp_path: Path) -> None:
    output = Output.directory(str(tmp_path / "out"))
    config = Other(str(tmp_path / "in"), output)
    (tmp_path / "in").write_bytes(b"1")

    def why(files: dict[str, str] | None, **code: str) -> str | None:
        first = decide("x", config, ["stages.runtime.up_to_date"], force=False)
        run = {} if files is None else {CODE_FILES: {**first.code_files, **files}}
        made = replace(first.new_manifest("x", run=run), code={**first.code, **code})
        slot = first.slot
        publish(output.manifest_url, made, slot.version if slot else None)
        return decide("x", config, ["stages.runtime.up_to_date"], force=False).reason

    assert why({}) is None
    changed = {"stages/runtime/up_to_date.py": "0", "trainyard/gone.py": "0"}
    reason = why(changed, digest="0" * 64)
    assert reason is not None
    assert reason.startswith("the code changed (00000000 -> ")
    assert reason.endswith(": stages/runtime/up_to_date.py, trainyard/gone.py)")
    many = {f"trainyard/{i}.py": "0" for i in range(7)}
    assert str(why(many, version="0")).endswith("trainyard/3.py, trainyard/4.py and 2 more)")
    assert why(None, digest="0" * 64) is not None, "an older manifest has no digests of files"


# --- what is missing --------------------------------------------------------------------------


def test_a_missing_input_is_named_by_its_option(tmp_path: Path) -> None:
    def decide_on(path: str, model: str) -> None:
        config = TokenizeConfig(
            input=(path,),
            output_prefix=str(tmp_path / "out"),
            tokenizer=TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model),
        )
        decide("tokenize", config, ["stages.runtime.up_to_date"], force=False)

    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "c_text_document.idx").write_bytes(b"")
    for name, hint in (
        ("a.json", f"the nearest name is {tmp_path / 'a.jsonl'}"),
        ("c", f"the nearest name is {tmp_path / 'c_text_document'}"),
        ("zzz", "check the path"),
        ("*.txt", "check the path"),
        ("empty", "the folder is empty"),
        ("none/at/all", f"there is no folder {tmp_path / 'none'}"),
    ):
        words = re.escape(f"--input {tmp_path / name}: no file matches; {hint}")
        with pytest.raises(ArtifactError, match=f"^{words}$"):
            decide_on(str(tmp_path / name), "m.json")
    for name, target, words in (
        (
            "loop.jsonl",
            "loop.jsonl",
            "a link to loop.jsonl, which leads back to it; fix or",
        ),
        ("lost.jsonl", "nowhere", "a link to nowhere, which does not exist; fix or remove it"),
        ("null.jsonl", "/dev/null", "not a file but a pipe or a device; copy it into a file"),
        ("x" * 300, "", "the file system takes no name as long; choose a shorter one"),
    ):
        if target:
            (tmp_path / name).symlink_to(target)
        with pytest.raises(ArtifactError, match=f"^--input .*{name}: {words}"):
            decide_on(str(tmp_path / name), "m.json")
    message = r"^--tokenizer-model meta/llama: no file .*hub are not looked up: download the files"
    with pytest.raises(ArtifactError, match=message):
        decide_on(str(tmp_path / "a.jsonl"), "meta/llama")


def test_a_derived_pattern_is_named_by_the_option_of_its_input(tmp_path: Path) -> None:
    config = MergeConfig(input=(str(tmp_path / "x*"),), output_prefix=str(tmp_path / "o/out"))
    with pytest.raises(ArtifactError, match=r"^--input .*x\*.*: no file matches"):
        decide("merge", config, ["stages.runtime.up_to_date"], force=False)
