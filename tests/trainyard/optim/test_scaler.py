"""The loss scale against the rule, written out as a table, and the options of precision."""

from __future__ import annotations

import json

import pytest

from trainyard.errors import ConfigError
from trainyard.optim.precision import PrecisionConfig
from trainyard.optim.scaler import ConstantScaler, DynamicScaler, build_scaler

# overflow?, then scale, growth and hysteresis trackers after it; window 3, hysteresis 2, from 16
TABLE = [
    (True, 16.0, 0, 1),  # one life
    (False, 16.0, 1, 1),
    (True, 8.0, 0, 0),  # and the other
    (True, 4.0, 0, -1),  # from here on each halves
    (False, 4.0, 1, -1),
    (False, 4.0, 2, -1),
    (True, 2.0, 0, -2),  # the window begins anew
    (True, 2.0, 0, -3),  # no less than the minimum
    (False, 2.0, 1, -3),
    (False, 2.0, 2, -3),
    (False, 4.0, 0, 2),  # a whole window: doubled, and the lives are back
    (True, 4.0, 0, 1),
    (True, 2.0, 0, 0),
]


def test_the_rule_of_the_dynamic_scale() -> None:
    scaler = DynamicScaler(16.0, 2.0, 3, 2)
    for step, (overflow, *expected) in enumerate(TABLE):
        scaler.update(overflow)
        assert list(scaler.state_dict().values()) == expected, step


def test_the_scale_continues() -> None:
    whole, first = DynamicScaler(16.0, 2.0, 3, 2), DynamicScaler(16.0, 2.0, 3, 2)
    for overflow, *_ in TABLE[:6]:
        whole.update(overflow)
        first.update(overflow)
    second = DynamicScaler(1024.0, 2.0, 3, 2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for overflow, *_ in TABLE[6:]:
        whole.update(overflow)
        second.update(overflow)
        assert whole.state_dict() == second.state_dict()


def test_the_scaler_of_the_options() -> None:
    assert build_scaler(PrecisionConfig()).scale == build_scaler(PrecisionConfig(bf16=True)).scale
    dynamic = build_scaler(PrecisionConfig(fp16=True))
    assert isinstance(dynamic, DynamicScaler)
    assert (dynamic.scale, dynamic.expects_overflow) == (2.0**32, True)
    constant = build_scaler(PrecisionConfig(fp16=True, loss_scale=128.0))
    assert isinstance(constant, ConstantScaler)
    constant.update(True)
    assert (constant.scale, constant.expects_overflow) == (128.0, True)


AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bf16": True, "fp16": True}, "--bf16 or --fp16"),
        ({"loss_scale": 2.0}, "--loss-scale is for --fp16"),
        ({"fp16": True, "loss_scale": 0.0}, "--loss-scale must be above 0"),
        ({"fp16": True, "min_loss_scale": 2.0**33}, "--min-loss-scale"),
        ({"fp16": True, "loss_scale_window": 0}, "--loss-scale-window"),
        ({"fp16": True, "hysteresis": 0}, "--hysteresis"),
        ({"grad_reduce_in_bf16": True}, "needs --bf16"),
        (
            {
                "bf16": True,
                "grad_reduce_in_bf16": True,
                "accumulate_allreduce_grads_in_fp32": True,
            },
            "contradict",
        ),
        ({"grad_reduce_in_fp16": True}, "--grad-reduce-in-fp16 needs --fp16"),
        ({"main_grads_dtype": "bf16", **AWARE}, "--main-grads-dtype bf16 needs --bf16"),
        ({"bf16": True, "exp_avg_dtype": "bf16"}, "needs --use-precision-aware-optimizer"),
        ({"exp_avg_sq_dtype": "fp8", **AWARE}, "fp8 is not implemented.*give bf16, which"),
        ({"main_params_dtype": "fp16", **AWARE}, "fp16 is not implemented.*give fp32"),
    ],
)
def test_formats_that_mean_nothing_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PrecisionConfig(**options)  # type: ignore[arg-type]
