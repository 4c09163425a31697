"""A run of an earlier version, whose manifest lists the files of all its steps, goes on.

`tests/golden/runs/one_manifest.tar.xz` is such a run of four steps, with its token files."""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.testing import assert_close

from flows.gc.sweep import sweep
from tests.flows.gc.yards import AT_ONCE
from tests.stages.directly import run_program
from tests.stages.pretrain_runs import flags, manifest
from trainyard.checkpoint.load import open_checkpoint
from trainyard.testing.kill import Zygote

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parents[1] / "golden" / "runs" / "one_manifest.tar.xz"

OPTIONS: dict[str, Any] = {
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 100,
    "make_vocab_size_divisible_by": 8,
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "lr": 0.01,
    "lr_decay_iters": 10,
    "num_threads": 1,
    "save_interval": 2,
    "eval_iters": 0,
    "split": "100,0,0",
}


@pytest.fixture
def yard(tmp_path: Path) -> Path:
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def train(zygote: Zygote, yard: Path, name: str, steps: int) -> str:
    given = {"data_path": yard / "t", "save": yard / name, "train_iters": steps, **OPTIONS}
    status, _, log = zygote.run("stages.pretrain", flags(given))
    assert status == 0, log
    return log


def check_alike(old: Path, new: Path) -> None:
    """Ledgers and weights, but for the seeds of the first four steps, which the old run digested
    otherwise, and what another processor rounds otherwise: it computed those steps on one."""
    ledgers = [
        [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
        for run in (old, new)
    ]
    for step, (one, other) in enumerate(zip(*ledgers, strict=True), 1):
        assert (one.pop("rng") == other.pop("rng")) == (step > 4)
        near = {
            name: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            for name, value in other.items()
        }
        assert one == near
    with open_checkpoint(str(old)) as before, open_checkpoint(str(new)) as after:
        assert before.names() == after.names()
        for name in before.names("model."):
            assert_close(before.read(name), after.read(name), rtol=1e-4, atol=1e-4)


def test_an_old_run_is_whole_and_goes_on_as_a_new_one(zygote: Zygote, yard: Path) -> None:
    run = yard / "run"
    assert any(f.path.startswith("iter_") for f in manifest(run).files), "recorded in one manifest"
    assert "nothing to do" in train(zygote, yard, "run", 4)
    verified = run_program("stages.verify", str(run), expect=0)
    assert "all as published" in verified.out
    assert "steps 1 to 4" in run_program("stages.certify", str(run), expect=0).out
    train(zygote, yard, "run", 6)
    train(zygote, yard, "new", 4)
    train(zygote, yard, "new", 6)
    for folder in (run, yard / "new"):
        steps = [part.path for part in manifest(folder).parts]
        assert steps == ["iter_0000002", "iter_0000004", "iter_0000006"]
        assert not any(f.path.startswith("iter_") for f in manifest(folder).files)
        assert "steps 1 to 6" in run_program("stages.certify", str(folder), expect=0).out
    check_alike(run, yard / "new")
    path = run / "iter_0000002" / "manifest.json"
    step = manifest(path.parent)
    files = tuple(f for f in step.files if not f.path.startswith("tokenizer/"))
    path.write_text(json.dumps(replace(step, files=files).to_document()))
    done = run_program("stages.certify", str(run), expect=1)
    assert "broken: step 2, files (iter_0000002/manifest.json): expected" in done.out


def test_an_old_run_is_resharded_and_kept_by_a_sweep(yard: Path) -> None:
    run, out = yard / "run", yard / "out"
    words = ("--load-dir", str(run), "--save-dir", str(out), "--num-shards", "2")
    run_program("stages.reshard", *words, expect=0)
    with open_checkpoint(str(run)) as one, open_checkpoint(str(out)) as other:
        assert set(one.index) == set(other.index)
    assert [part.path for part in manifest(out).parts] == ["iter_0000004"]
    assert "nothing to do" in run_program("stages.reshard", *words, expect=0).err
    before = sorted(run.rglob("*"))
    assert sweep(str(yard), [], AT_ONCE, remove=True).failed == ()
    assert sorted(run.rglob("*")) == before


def test_a_step_that_an_old_run_lists_is_missed(yard: Path) -> None:
    run = yard / "run"
    shutil.rmtree(run / "iter_0000002")
    done = run_program("stages.verify", str(run))
    assert done.status == 1
    assert "iter_0000002/model-00001-of-00001.safetensors: missing" in done.err
