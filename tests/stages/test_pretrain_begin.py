"""Where a pretraining starts: learning rates, weights, number formats, vocabulary padding."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.stages.pretrain_runs import Pretrain, ledger
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.steps import find_steps

pytestmark = pytest.mark.slow

QUICK = {"eval_iters": 0, "train_iters": 6, "lr_warmup_iters": 2, "lr_decay_style": "linear"}
STOPPED = 143


@pytest.fixture(scope="module")
def whole(pretrain: Pretrain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    pretrain(folder, **QUICK)
    return folder


# --- rates --------------------------------------------------------------------------------------


def test_changed_rates_are_refused_by_name(pretrain: Pretrain, whole: Path, tmp_path: Path) -> None:
    options = {**QUICK, "load": str(whole / "iter_0000003"), "train_iters": 8, "lr": 0.02}
    log = pretrain(tmp_path / "on", **options, expect=2)
    assert "--lr is 0.02 here and 0.01 there" in log
    assert (
        "--lr-decay-iters (or -samples; the run unless given) is 32 samples here and 24 samples "
        in log
    )
    assert "--train-iters" not in log, "weight decay is constant: its length says nothing"
    assert "--override-opt-param-scheduler" in log
    assert find_steps(str(tmp_path / "on")) == []


def test_an_option_chooses_between_the_rates_of_run_and_checkpoint(
    pretrain: Pretrain, whole: Path, tmp_path: Path
) -> None:
    options = {**QUICK, "load": str(whole / "iter_0000003"), "lr": 0.02}
    pretrain(tmp_path / "ours", **options, override_opt_param_scheduler=True)
    theirs = partial(
        pretrain, tmp_path / "theirs", **options, use_checkpoint_opt_param_scheduler=True
    )
    # Stopped on the way: what goes on is still the schedule of the checkpoint.
    theirs(exit_interval=4, expect=STOPPED)
    log = theirs()
    assert "resuming from step 4" in log
    before = [line["learning_rate"] for line in ledger(whole)][3:]
    assert [line["learning_rate"] for line in ledger(tmp_path / "theirs")] == before
    doubled = [line["learning_rate"] for line in ledger(tmp_path / "ours")]
    assert doubled == pytest.approx([2 * rate for rate in before])


# --- weights alone ------------------------------------------------------------------------------


def test_finetune_applies_only_to_the_first_start(
    pretrain: Pretrain, whole: Path, tmp_path: Path
) -> None:
    options = {**QUICK, "load": str(whole), "finetune": True, "lr": 1e-4}
    log = pretrain(tmp_path / "straight", **options)
    assert f"from step 6 of {whole}" in log
    cut = partial(pretrain, tmp_path / "cut", **options)
    cut(exit_interval=2, expect=STOPPED)
    log = cut()
    assert "--finetune applied when this run began; resuming from its own step 2" in log
    assert ledger(tmp_path / "cut") == ledger(tmp_path / "straight")
    assert [line["step"] for line in ledger(tmp_path / "cut")] == [1, 2, 3, 4, 5, 6]


# --- number formats -----------------------------------------------------------------------------


def test_fp32_run_resumes_in_bf16_and_back(pretrain: Pretrain, whole: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "bf16", tmp_path / "fp32"
    options = {**QUICK, "load": str(whole / "iter_0000003"), "exit_interval": 4}
    pretrain(there, **options, bf16=True, expect=STOPPED)
    with open_checkpoint(str(whole / "iter_0000003")) as before, open_checkpoint(str(there)) as now:
        for name in before.names("model."):
            main = now.read(f"optimizer.param.{name.removeprefix('model.')}")
            moved = (main - before.read(name)).abs().max()
            assert moved < 0.02, name  # one step at 0.01
            assert now.spec(name).dtype == "BF16"
            assert now.read(name).equal(main.bfloat16())
        assert now.state["num_updates"] == 4
    pretrain(back, **QUICK, load=str(there))
    # As if it had been fp32 all along, but for one step in bf16.
    one, other = ledger(back)[-1], ledger(whole)[-1]
    assert one["lm_loss"] == pytest.approx(other["lm_loss"], rel=2e-3)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)


# --- vocabulary ---------------------------------------------------------------------------------


@pytest.mark.parametrize("finetune", [False, True])
def test_a_run_resumes_with_another_padding_of_the_vocabulary(
    pretrain: Pretrain, whole: Path, tmp_path: Path, finetune: bool
) -> None:
    options = {**QUICK, "load": str(whole / "iter_0000003"), "make_vocab_size_divisible_by": 768}
    options |= {"finetune": True} if finetune else {}
    log = pretrain(tmp_path / "on", **options)
    message = "padded vocabulary: 1536 rows, 1024 in the checkpoint"
    assert log.count(message) == 1
    assert "rows from 1024 on get initial weights and zero moments" in log
    with open_checkpoint(str(tmp_path / "on")) as found:
        assert found.spec("model.embedding.word_embeddings.weight").shape[0] == 1536


def test_another_vocabulary_is_refused(pretrain: Pretrain, whole: Path, tmp_path: Path) -> None:
    options = {**QUICK, "load": str(whole), "finetune": True, "vocab_size": 1400}
    log = pretrain(tmp_path / "on", **options, expect=2)
    assert "has a vocabulary of 1024 rows (1001 tokens, padded)" in log
    assert "use the tokenizer that it was trained with" in log


# --- pipelines ----------------------------------------------------------------------------------


def test_indivisible_micro_batch_group_is_refused(pretrain: Pretrain, tmp_path: Path) -> None:
    options = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    options |= {"microbatch_group_size_per_virtual_pipeline_stage": 3, "nproc_per_node": 2}
    options |= {"num_layers": 4, "global_batch_size": 8}
    log = pretrain(tmp_path / "run", **options, expect=2)
    assert "--microbatch-group-size-per-virtual-pipeline-stage 3" in log
    assert "choose 2 or 4" in log
