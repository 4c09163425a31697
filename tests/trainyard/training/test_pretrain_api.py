"""Pretraining as a library call, docs/examples/bytes_model.py included."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stages.pretrain.config import PretrainConfig as StageConfig
from stages.runtime.up_to_date import decide
from tests.trainyard.training.small_gpt import LENGTH, MODEL
from tests.trainyard.training.small_gpt import VOCAB as VOCABULARY
from trainyard.artifacts.claim import acquire
from trainyard.artifacts.manifest import read_manifest
from trainyard.checkpoint.model import load_model
from trainyard.corpus.indexed import IndexedWriter
from trainyard.datasets.config import DataConfig
from trainyard.datasets.loader import Batch
from trainyard.datasets.sampler import SamplerShape
from trainyard.datasets.user_datasets import ProvidedData
from trainyard.errors import ArtifactError, ClaimHeldError, ConfigError, DataError
from trainyard.models.gpt.model import GPTModel
from trainyard.models.pipeline_stage import PipelineStage
from trainyard.optim.config import OptimizerConfig
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.model import ModelParallel
from trainyard.testing.pool import RankPool
from trainyard.tokenizers.config import TokenizerConfig
from trainyard.training.loop.events import Callback, StepEvent
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.options.training import TrainingConfig
from trainyard.training.overrides import Overrides
from trainyard.training.pretrain import _identity, pretrain
from trainyard.training.result import Result

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/library.md").read_text()
PROGRAM = (ROOT / "docs/examples/bytes_model.py").read_text()
SHORT = PROGRAM.replace("train_iters=60, eval_interval=30", "train_iters=6, eval_interval=3")
TOLERANCE = 1e-5
"""Relative, of losses: sums over two ranks are grouped otherwise."""

TRAINING = TrainingConfig(
    micro_batch_size=2, global_batch_size=4, train_iters=4, eval_interval=2, eval_iters=1
)


def options(save: Path, **others: Any) -> PretrainConfig:
    given: dict[str, Any] = {
        "model": MODEL,
        "tokenizer": TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY),
        "data": ProvidedData(),
        "optimizer": OptimizerConfig(lr=1e-2),
        "training": TRAINING,
        "save": str(save),
    }
    return PretrainConfig(**given | others)


class Counting:
    """Samples that count upwards."""

    def __init__(self, size: int = 64) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        text = (index * 5 + np.arange(LENGTH + 1)) % VOCABULARY
        mask = np.ones(LENGTH, np.float32)
        return {"tokens": text[:-1], "labels": text[1:], "loss_mask": mask}


def counting(num_train: int, num_valid: int) -> tuple[Counting, Counting]:
    assert (num_train, num_valid) == (16, 12)
    return Counting(), Counting()


def ledger(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


# --- the page -----------------------------------------------------------------------------------


def run_program(code: str, folder: str, world_size: int) -> None:
    """The printed program in this process, as torchrun would start it."""
    before = os.environ.get("WORLD_SIZE")
    os.chdir(folder)
    os.environ["WORLD_SIZE"] = str(world_size)
    try:
        exec(compile(code, "bytes_model.py", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(ROOT)
        os.environ.pop("WORLD_SIZE")
        if before is not None:
            os.environ["WORLD_SIZE"] = before


@pytest.mark.slow
@pytest.mark.distributed
def test_the_documented_model_learns_the_same_under_any_layout(
    tmp_path: Path, ranks: RankPool
) -> None:
    cuts = {
        "one": (1, None),
        "tensor": (2, None),  # as printed: all ranks share the matrices
        "pipeline": (2, "pipeline_model_parallel_size=2"),
        "data": (2, ""),
        "sharded data": (2, "data_parallel=api.DataParallelConfig(use_torch_fsdp2=True)"),
    }
    found = {}
    for name, (world_size, parallel) in cuts.items():
        (tmp_path / name).mkdir()
        # Shuffled, the order of samples would follow the number of data-parallel ranks.
        code = SHORT.replace('dataloader_type="cyclic"', 'dataloader_type="single"')
        code = f"from trainyard import api\n{code}"
        if parallel is not None:
            code = re.sub(r"ParallelConfig\(tensor.*\),", f"ParallelConfig({parallel}),", code)
            assert f"ParallelConfig({parallel})" in code
        ranks.run(run_program, world_size, code, str(tmp_path / name), world_size)
        found[name] = ledger(tmp_path / name / "run-bytes")
    assert len(found["one"]) == 6
    assert found["one"][-1]["lm_loss"] < found["one"][0]["lm_loss"] - 0.5
    for lines in found.values():
        for line, expected in zip(lines, found["one"], strict=True):
            assert line["samples"] == expected["samples"]
            assert line["lm_loss"] == pytest.approx(expected["lm_loss"], rel=TOLERANCE)


@pytest.mark.slow
def test_the_documented_program_learns_as_the_page_says(tmp_path: Path) -> None:
    run_program(PROGRAM, str(tmp_path), 1)
    lines = ledger(tmp_path / "run-bytes")
    losses = re.search(r"The loss falls from (\S+) to about (\d\.\d)\. Called again", PAGE)
    assert losses is not None
    assert lines[0]["lm_loss"] == pytest.approx(float(losses[1]), abs=0.01)
    assert lines[-1]["lm_loss"] == pytest.approx(float(losses[2]), abs=0.1)


# --- stopping and going on ----------------------------------------------------------------------


def test_a_paused_run_resumes_to_the_same_ledger(tmp_path: Path) -> None:
    whole = pretrain(None, counting, options(tmp_path / "whole"))
    assert whole.outcome == "finished"
    assert [line["step"] for line in whole.ledger] == [1, 2, 3, 4]
    assert whole.metrics["parameters"] == MODEL.num_params(128)
    pausing = options(tmp_path / "cut", training=replace(TRAINING, exit_interval=3))
    paused = pretrain(None, counting, pausing)
    assert (paused.outcome, paused.state.step, paused.ledger) == ("paused", 3, [])
    assert not (tmp_path / "cut/manifest.json").exists()
    again = pretrain(None, counting, options(tmp_path / "cut"))
    assert again.outcome == "finished"
    assert again.ledger == whole.ledger
    finished = [read_manifest(str(tmp_path / name / "manifest.json")) for name in ("whole", "cut")]
    assert finished[0] is not None
    assert finished[1] is not None
    assert finished[0][0].output_digest == finished[1][0].output_digest
    timings = (tmp_path / "cut/timings.jsonl").read_text()
    assert len(timings.splitlines()) == 4
    third = pretrain(None, counting, options(tmp_path / "cut"))
    assert third.ledger == whole.ledger
    assert (tmp_path / "cut/timings.jsonl").read_text() == timings


def test_a_signal_saves_and_returns(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)

    class Raising(Callback):
        def after_step(self, event: StepEvent) -> None:
            if event.record.step == 1:
                signal.raise_signal(signal.SIGUSR1)

    stopped = pretrain(None, counting, options(tmp_path), callbacks=[Raising()])
    assert (stopped.outcome, stopped.state.step) == ("stopped", 2)
    assert signal.getsignal(signal.SIGUSR1) is before
    assert pretrain(None, counting, options(tmp_path)).state.step == 4


# --- what is brought along ----------------------------------------------------------------------


class Bag(nn.Module):
    """Predicts each token from itself alone; knows nothing of stages."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.table(tokens)
        return logits


def test_the_caller_provides_model_loss_and_initial_weights(tmp_path: Path) -> None:
    seen: list[str] = []

    def model(parallel: ModelParallel, pipeline_stage: PipelineStage) -> nn.Module:
        assert pipeline_stage.has_embedding
        assert pipeline_stage.has_output
        return Bag()

    def forward(module: nn.Module, hidden: Tensor | None, batch: Batch) -> Tensor:
        seen.extend(key for key in batch if key not in seen)
        logits = module(batch["tokens"])
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="none"
        ).view(batch["labels"].shape)

    def zeros(module: nn.Module, seed: int) -> None:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)

    result: Result = pretrain(
        model,
        lambda train, valid: (Counting(), {"a": Counting(), "b": Counting()}),
        options(tmp_path),
        forward_step=forward,
        initialize=zeros,
    )
    assert result.ledger[0]["lm_loss"] == pytest.approx(np.log(VOCABULARY))
    assert result.ledger[-1]["lm_loss"] < result.ledger[0]["lm_loss"]
    assert sorted(result.ledger[-1]["validation_losses"]) == ["a", "b"]
    assert result.metrics["parameters"] == VOCABULARY**2
    assert isinstance(result.chunks[0], Bag)
    assert {"tokens", "labels", "loss_mask"} <= set(seen)
    document = json.loads((tmp_path / "iter_0000004/config.json").read_text())
    assert document["provided"]["model_provider"].endswith("initial_weights.<locals>.model")
    with pytest.raises(ArtifactError, match="a model of a user's program"):
        load_model(str(tmp_path))


class Loading(Counting):
    """Data that loads itself."""

    def batches(self, shape: SamplerShape, consumed: int, dp_rank: int) -> Iterator[Batch]:
        while True:
            rows = [self[consumed + i] for i in range(shape.micro_batch_size)]
            consumed += shape.micro_batch_size
            yield {key: torch.from_numpy(np.stack([r[key] for r in rows])) for key in rows[0]}


def test_data_may_come_from_an_external_loader(tmp_path: Path) -> None:
    config = options(tmp_path, data=ProvidedData(dataloader_type="external"))
    training = replace(TRAINING, eval_iters=0)
    result = pretrain(None, lambda t, v: (Loading(), None), replace(config, training=training))
    assert result.outcome == "finished"
    assert {line["samples"] for line in result.ledger} == {""}


def test_without_overrides_the_run_equals_that_of_the_stage(tmp_path: Path) -> None:
    prefix = tmp_path / "tokens"
    with open(f"{prefix}.bin", "wb") as data, open(f"{prefix}.idx", "wb") as index:
        writer = IndexedWriter(data, np.uint16)
        for _ in range(40):
            writer.add_document([np.arange(30) % VOCABULARY])
        writer.write_index(index)
    config = options(tmp_path / "run", data=DataConfig(data_path=(str(prefix),), split="9,1,0"))
    stage = StageConfig(
        model=config.model,
        tokenizer=config.tokenizer,
        data=config.data,
        optimizer=config.optimizer,
        training=config.training,
        save=config.save,
    )
    decision = decide("pretrain", stage, ("stages.pretrain.run",), force=False)
    assert _identity(config, Overrides())[1] == decision.lineage
    assert pretrain(None, None, config).outcome == "finished"
    found = read_manifest(str(tmp_path / "run/manifest.json"))
    assert found is not None
    assert found[0].lineage == decision.lineage


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "provider", "words"),
    [
        ({}, None, "none is given"),
        ({"data": DataConfig(mock_data=True, dataloader_type="external")}, None, "external"),
        ({"parallel": ParallelConfig(nproc_per_node=2)}, counting, "torchrun --nproc-per-node 2"),
        (
            {"parallel": ParallelConfig(tensor_model_parallel_size=2)},
            counting,
            "1 rank does not fit the layout",
        ),
        (
            {},
            lambda train, valid: (Counting(train - 1), Counting()),
            "has 15 samples and the run needs 16",
        ),
        ({}, lambda train, valid: (Counting(), None), "no validation data"),
        ({}, lambda train, valid: (Counting(), Counting(valid - 1)), "valid has 11 samples"),
    ],
)
def test_invalid_calls_are_refused(
    tmp_path: Path, others: dict[str, Any], provider: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        pretrain(None, provider, options(tmp_path / "run", **others))
    assert not list((tmp_path / "run").glob("iter_*"))


def test_paths_and_a_provider_are_not_both_given() -> None:
    with pytest.raises(ConfigError, match="--data-path cannot be given, as the dataset_provider"):
        ProvidedData(data_path=("somewhere",))


def test_invalid_samples_are_refused(tmp_path: Path) -> None:
    class Wrong(Counting):
        def __getitem__(self, index: int) -> dict[str, Any]:
            sample = super().__getitem__(index)
            sample["labels"] = sample["labels"] + (VOCABULARY if index == 3 else 0)
            return sample

    class Bare(Counting):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"tokens": np.arange(LENGTH), "labels": np.arange(LENGTH)}

    with pytest.raises(DataError, match="sample 0 has tokens, labels and no loss_mask"):
        pretrain(None, lambda t, v: (Bare(), Counting()), options(tmp_path))
    words = r"training data: sample 3 has \d+ among its labels at place 0, outside the vocabulary"
    with pytest.raises(DataError, match=words):
        pretrain(None, lambda t, v: (Wrong(), Counting()), options(tmp_path))


def test_two_programs_do_not_write_one_folder(tmp_path: Path) -> None:
    config = options(tmp_path)
    claim = acquire(config.output().claim_url, 0.0)
    try:
        with pytest.raises(ClaimHeldError):
            pretrain(None, counting, config)
    finally:
        claim.release()
    assert isinstance(pretrain(None, counting, config).chunks[0], GPTModel)
