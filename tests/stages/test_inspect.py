"""The inspect stage: the content of a checkpoint and differences between two, as text and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stages.directly import Done, run_program
from tests.trainyard.checkpoint.samples import random_gpt, save, save_gpt
from trainyard.models.gpt.config import GPTConfig

CONFIG = GPTConfig(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, swiglu=True)
NORM = "model.decoder.final_layernorm.weight"


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpt")
    save_gpt(str(root), random_gpt(CONFIG))
    return root


def inspect(*words: str | Path, expect: int | None = None) -> Done:
    return run_program("stages.inspect", *map(str, words), expect=expect)


def document(*words: str | Path) -> Any:
    return json.loads(inspect(*words, "--json").out)


# --- one ----------------------------------------------------------------------------------------


def test_the_table_has_tensors_layout_totals_digests_and_training(gpt: Path) -> None:
    done = inspect(gpt, expect=0)
    lines = done.out.splitlines()
    words = [line.split() for line in reversed(lines) if line.strip()]
    rows = {row[0]: " ".join(row) for row in words}  # of two that begin alike, the first
    assert rows["checkpoint"].endswith("iter_0000050")
    assert rows["training"] == "training step 50"
    assert rows["model"].startswith("model num layers 2, hidden size 16, num attention heads 2")
    assert "swiglu true" in rows["model"]
    assert "rotary" not in rows["model"]  # options that are their defaults
    parameters = sum(p.numel() for p in random_gpt(CONFIG).parameters())
    assert rows["parameters"] == f"parameters {parameters:,}"
    assert rows[NORM] == f"{NORM} F32 16 64 1 model-00001-of-00001.safetensors"
    assert rows["optimizer.exp_avg"].split()[1] == "F32"
    record = json.loads((gpt / "iter_0000050" / "manifest.json").read_text())["files"][1]
    assert f"{record['path']} {record['size_bytes']:,} {record['digest'][:12]}" in rows.values()
    assert all(len(line) < 400 for line in lines)


def test_the_document_has_all_of_it_and_no_more_with_a_filter(gpt: Path) -> None:
    whole = document(gpt / "iter_0000050")
    assert whole["format_version"] == 1
    assert whole["model"]["swiglu"] is True
    names = [tensor["name"] for tensor in whole["tensors"]]
    assert names == sorted(names)
    some = document(gpt, "--filter", "model.*.weight", "rng.*")
    wanted = [n for n in names if n.startswith(("model.", "rng."))]
    assert [t["name"] for t in some["tensors"]] == [
        n for n in wanted if n.endswith("weight") or n.startswith("rng")
    ]


def test_rows_are_cut_off_and_counted(gpt: Path) -> None:
    total = len(document(gpt)["tensors"])
    assert f"and {total - 3:,} more; --max-rows 0 shows all" in inspect(gpt, "--max-rows", "3").out
    assert "more; --max-rows" not in inspect(gpt, "--max-rows", "0").out


def test_a_filter_that_nothing_matches_is_refused(gpt: Path) -> None:
    done = inspect(gpt, "--filter", "decoder.*", expect=2)
    assert "--filter decoder.*: none of the" in done.err
    assert "model.decoder" in done.err


def test_a_model_of_an_unknown_family_is_shown_as_far_as_possible(tmp_path: Path) -> None:
    save(str(tmp_path), {"model.a": torch.ones(2)}, documents={"config.json": {"model": {"x": 1}}})
    assert "x 1" in inspect(tmp_path).out
    save(str(tmp_path), {"model.a": torch.ones(2)}, documents={"config.json": {"of": "others"}})
    done = inspect(tmp_path)
    assert (done.status, "unknown" in done.out) == (0, True)


def test_damage_is_found_according_to_verify_checkpoint(tmp_path: Path) -> None:
    save(str(tmp_path), {"model.a": torch.ones(2)})
    path = tmp_path / "iter_0000050" / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    inspect(tmp_path, expect=0)
    done = inspect(tmp_path, "--verify-checkpoint", "digests")
    assert (done.status, f"{path.name}: digest" in done.err) == (1, True)
    path.write_bytes(b"x")
    done = inspect(tmp_path)
    assert (done.status, f"{path.name}: 1 bytes" in done.err) == (1, True)
    inspect(tmp_path, "--verify-checkpoint", "none", expect=0)


def hostile(root: Path) -> Path:
    """A complete step whose texts are all control sequences of a terminal."""
    say = "\x1b]0;owned\x07\r\n"
    model = {say: say, "num_layers": say}
    save(str(root), {"model.a": torch.ones(2)}, documents={"config.json": {"model": model}})
    path = root / "iter_0000050" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest |= {"stage": say, "lineage": say, "run": {"spans": [{say: say}]}}
    path.write_text(json.dumps(manifest))
    return root


def test_control_characters_in_files_do_not_reach_the_terminal(gpt: Path, tmp_path: Path) -> None:
    root = hostile(tmp_path)
    for words in ((root,), (root, "--json"), (root, "--diff", gpt), (gpt, "--diff", root)):
        done = inspect(*words)
        assert done.status in (0, 4), done.err
        assert "owned" in done.out
        assert (done.out + done.err).replace("\n", "").isprintable()
    rows = [line for line in inspect(root).out.splitlines() if "owned" in line]
    assert [row.split()[0] for row in rows] == ["written", "ranks", "model"]


# --- two ----------------------------------------------------------------------------------------


def changed(root: Path, step: int = 50, by: float = 0.25) -> None:
    """The model of the fixture with one changed element, in other files."""
    model = random_gpt(CONFIG)
    with torch.no_grad():
        model.state_dict(keep_vars=True)[NORM.removeprefix("model.")][3] += by
    save_gpt(str(root), model, step, shard_size_bytes=3000)


@pytest.mark.slow
def test_equal_checkpoints_of_other_layouts_end_with_status_0(gpt: Path, tmp_path: Path) -> None:
    changed(tmp_path, by=0.0)
    done = inspect(gpt, "--diff", tmp_path, expect=0)
    assert "equal: " in done.out
    found = document(gpt, "--diff", tmp_path)
    assert (found["equal"], found["tensors"], found["documents"]) == (True, [], [])


@pytest.mark.slow
def test_differences_are_shown_and_exit_with_status_4(gpt: Path, tmp_path: Path) -> None:
    changed(tmp_path, step=60)
    done = inspect(gpt, "--diff", tmp_path, expect=4)
    row = next(line for line in done.out.splitlines() if line.startswith(NORM))
    assert "1 of 16" in row
    assert " 0.25  [3] " in row
    assert [line.split() for line in done.out.splitlines() if line.startswith("state.json")] == [
        ["state.json", "consumed_samples", "200", "240"],
        ["state.json", "step", "50", "60"],
    ]
    assert "differ: 1 of " in done.err
    found = document(gpt, "--diff", tmp_path)
    (tensor,) = found["tensors"]
    assert (tensor["name"], tensor["differing"]) == (NORM, 1)
    assert (tensor["absolute"]["difference"], tensor["absolute"]["index"]) == (0.25, [3])
    assert {key["key"] for key in found["documents"]} == {"consumed_samples", "step"}


def test_a_filter_compares_only_its_tensors(gpt: Path, tmp_path: Path) -> None:
    changed(tmp_path, step=60)
    inspect(gpt, "--diff", tmp_path, "--filter", "optimizer.*", expect=0)
    done = inspect(gpt, "--diff", tmp_path, "--filter", NORM, expect=4)
    assert "state.json" not in done.out


def test_infinite_differences_are_strings_in_json(tmp_path: Path) -> None:
    for side, value in (("a", 1.0), ("b", float("nan"))):
        save(str(tmp_path / side), {"model.a": torch.tensor([value])})
    (tensor,) = document(tmp_path / "a", "--diff", tmp_path / "b")["tensors"]
    assert tensor["absolute"]["difference"] == "inf"
    assert tensor["absolute"]["theirs"] == "nan"


def test_a_tensor_of_only_one_checkpoint_is_shown(tmp_path: Path) -> None:
    ones = {"model.both": torch.ones(2), "model.shape": torch.ones(2)}
    save(str(tmp_path / "a"), {**ones, "model.a": torch.ones(1)})
    save(str(tmp_path / "b"), {**ones, "model.shape": torch.ones(3)})
    done = inspect(tmp_path / "a", "--diff", tmp_path / "b")
    rows = [line.split("  ", 1)[0] for line in done.out.splitlines() if line.startswith("model.")]
    assert rows == ["model.a", "model.shape"]
    assert "only in ours" in done.out
    assert "F32 [2], F32 [3]" in done.out


def test_a_table_that_only_one_has_is_one_row(tmp_path: Path) -> None:
    """A run, and a conversion of it without its options."""
    ones = {"model.a": torch.ones(1)}
    options = {f"option_{n}": n for n in range(20)}
    for side, run in (("a", options), ("b", {})):
        config = {"run": run, "vocab_size": 8, "inputs": {"data": "1"} if run else {}}
        save(str(tmp_path / side), ones, documents={"config.json": config})
    done = inspect(tmp_path / "a", "--diff", tmp_path / "b")
    rows = [line.split() for line in done.out.splitlines() if line.startswith("config.json")]
    assert rows == [
        ["config.json", "inputs.data", "1", "(absent)"],
        ["config.json", "run.*", "(20", "keys)", "(absent)"],
    ]
    found = document(tmp_path / "b", "--diff", tmp_path / "a")["documents"]
    assert [key["key"] for key in found if key["only_in"] == "theirs"] == [
        "inputs.data",
        *sorted(f"run.{name}" for name in options),
    ]
    assert len(found) == 21


def test_a_missing_checkpoint_is_not_a_difference(gpt: Path, tmp_path: Path) -> None:
    done = inspect(gpt, "--diff", tmp_path / "nowhere", expect=1)
    assert f"--diff {tmp_path / 'nowhere'}: no checkpoint there" in done.err
