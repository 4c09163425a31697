"""The schedules against Megatron-LM's values, to the last digit."""

from __future__ import annotations

import json

import pytest

from tests.vectors import GOLDEN
from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.schedule import (
    LearningRateSchedule,
    WeightDecaySchedule,
    build_optimizer_schedule,
)
from trainyard.training.loop.batch_size import build_batch_size_schedule


def test_both_rates_equal_megatrons() -> None:
    golden = json.loads((GOLDEN / "megatron_vectors.json").read_text())
    setup = golden["lr_setup"]
    decay = WeightDecaySchedule(
        start=setup["start_wd"],
        end=setup["end_wd"],
        steps=setup["wd_steps"],
        style=setup["wd_style"],
    )
    assert len(golden["lr"]) == 8
    for kind, values in golden["lr"].items():
        style, _, wsd_style = kind.partition(":")
        rate = LearningRateSchedule(
            init_lr=setup["init_lr"],
            max_lr=setup["max_lr"],
            min_lr=setup["min_lr"],
            warmup_steps=setup["warmup"],
            decay_steps=setup["decay"],
            style=style,  # type: ignore[arg-type]
            wsd_decay_steps=setup["wsd_decay"],
            wsd_style=wsd_style or "linear",  # type: ignore[arg-type]
        )
        for step, expected in values.items():
            assert [rate.at(int(step)), decay.at(int(step))] == expected, (kind, step)


def test_iterations_become_samples() -> None:
    config = OptimizerConfig(lr=1.0, lr_warmup_iters=10, lr_decay_iters=50)
    schedule = build_optimizer_schedule(config, train_iters=100, global_batch_size=8)
    assert schedule.learning_rate.at(5 * 8) == 0.5
    assert schedule.learning_rate.at(50 * 8) == 0.0
    assert schedule.weight_decay.at(0) == 0.01


def test_samples_are_taken_as_they_are() -> None:
    config = OptimizerConfig(
        lr=1.0,
        lr_warmup_samples=10,
        lr_decay_samples=50,
        lr_decay_style="WSD",
        lr_wsd_decay_samples=20,
        lr_wsd_decay_style="linear",
        start_weight_decay=0.0,
        end_weight_decay=1.0,
        weight_decay_incr_style="linear",
    )
    schedule = build_optimizer_schedule(config, None, 8, train_samples=100)
    rates = {n: schedule.at(n) for n in (5, 30, 40, 50, 100)}
    assert [rate.learning_rate for rate in rates.values()] == [0.5, 1.0, 0.5, 0.0, 0.0]
    assert [rate.weight_decay for rate in rates.values()] == [0.05, 0.3, 0.4, 0.5, 1.0]
    fraction = OptimizerConfig(lr=1.0, lr_warmup_fraction=0.1)
    assert build_optimizer_schedule(fraction, None, 8, train_samples=100).at(5).learning_rate == 0.5


def test_the_decoupled_rate_follows_its_own_bounds() -> None:
    options = {"lr": 1.0, "min_lr": 0.2, "lr_warmup_iters": 10, "lr_decay_iters": 20}
    config = OptimizerConfig(**options, decoupled_lr=4.0)  # type: ignore[arg-type]
    schedule = build_optimizer_schedule(config, 20, 1)
    assert [schedule.at(n).decoupled_learning_rate for n in (5, 10, 15, 20)] == [2, 4, 2.1, 0.2]
    assert schedule.at(15).learning_rate == pytest.approx(0.6)
    config = OptimizerConfig(**options, decoupled_lr=4.0, decoupled_min_lr=2.0)  # type: ignore[arg-type]
    assert build_optimizer_schedule(config, 20, 1).at(15).decoupled_learning_rate == 3.0
    config = OptimizerConfig(**options)  # type: ignore[arg-type]
    rates = build_optimizer_schedule(config, 20, 1).at(7)
    assert rates.decoupled_learning_rate == rates.learning_rate


def test_decay_takes_the_whole_run_unless_said() -> None:
    schedule = build_optimizer_schedule(OptimizerConfig(lr=1.0, min_lr=0.5), 100, 4)
    assert schedule.learning_rate.at(200) == 0.75


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_lr": 2.0}, "--min-lr"),
        ({"lr_warmup_iters": 3, "lr_warmup_fraction": 0.1}, "not both"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"lr_wsd_decay_iters": 3}, "--lr-decay-style WSD"),
        ({"weight_decay_incr_style": "linear"}, "--start-weight-decay"),
        ({"start_weight_decay": 0.1}, "--weight-decay-incr-style"),
        ({"adam_beta1": 1.0}, "--adam-beta1"),
        ({"clip_grad": -1.0}, "--clip-grad"),
        ({"sgd_momentum": 1.0}, "--sgd-momentum"),
        ({"lr_warmup_samples": 3, "lr_warmup_fraction": 0.1}, "not both"),
        ({"lr_decay_samples": 0}, "--lr-decay-samples"),
        ({"decoupled_min_lr": 0.1}, "needs --decoupled-lr"),
        ({"decoupled_lr": 0.1, "min_lr": 0.2}, "give --decoupled-min-lr"),
    ],
)
def test_rates_that_mean_nothing_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(lr=1.0, **options)  # type: ignore[arg-type]


def test_a_warmup_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--lr-warmup-iters 10: .* 40 samples"):
        build_optimizer_schedule(OptimizerConfig(lr=1.0, lr_warmup_iters=10), 10, 4)
    config = OptimizerConfig(lr=1.0, lr_decay_style="WSD", lr_wsd_decay_iters=11)
    with pytest.raises(ConfigError, match=r"--lr-wsd-decay-iters 11"):
        build_optimizer_schedule(config, 10, 4)


def test_iterations_of_a_batch_that_grows_are_counted_by_their_samples() -> None:
    ramp = build_batch_size_schedule(
        global_batch_size=8, micro_batch_size=1, dp=1, rampup_batch_size=(2, 2, 12)
    )
    config = OptimizerConfig(
        lr=1.0, lr_warmup_iters=2, lr_decay_style="WSD", lr_decay_iters=9, lr_wsd_decay_iters=3
    )
    rates = build_optimizer_schedule(config, 9, 8, None, ramp.samples_after).learning_rate
    after = ramp.samples_after
    assert (rates.warmup_steps, rates.decay_steps) == (after(2), after(9))
    assert rates.at(after(2)) == rates.at(after(6)) == 1.0 > rates.at(after(7))
    assert rates.at(after(9)) == 0.0


def test_samples_and_iterations_do_not_mix() -> None:
    with pytest.raises(
        ConfigError, match=r"--lr-decay-samples goes with --train-samples; .*-iters"
    ):
        build_optimizer_schedule(OptimizerConfig(lr=1.0, lr_decay_samples=10), 10, 4)
    with pytest.raises(ConfigError, match=r"--lr-warmup-iters goes with --train-iters; .*-samples"):
        build_optimizer_schedule(
            OptimizerConfig(lr=1.0, lr_warmup_iters=2), None, 4, train_samples=100
        )
