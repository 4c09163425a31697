"""Which rates go on after a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.schedule import Schedule, build_schedule
from trainyard.optim.schedule_resume import continue_schedule, schedule_document


def schedule(**options: Any) -> tuple[Schedule, OptimizerConfig]:
    config = OptimizerConfig(**{"lr": 1.0, **options})
    return build_schedule(config, 100, 4), config


def document(**options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(schedule_document(schedule(**options)[0])))
    return found


@pytest.mark.parametrize("options", [{}, {"decoupled_lr": 0.5}, {"lr_warmup_fraction": 0.25}])
def test_equal_rates_go_on(options: dict[str, Any]) -> None:
    ours, config = schedule(**options)
    assert continue_schedule(ours, document(**options), config) == ours


def test_differing_rates_are_refused_and_all_named() -> None:
    ours, config = schedule(min_lr=0.1, lr_decay_style="cosine")
    words = r"--min-lr is 0.1 here and 0.0 there; --lr-decay-style is cosine here and linear there"
    with pytest.raises(ConfigError, match=words):
        continue_schedule(ours, document(), config)
    with pytest.raises(ConfigError, match="--override-opt-param-scheduler"):
        continue_schedule(ours, document(), config)
    ours, config = schedule(decoupled_lr=0.5)
    with pytest.raises(ConfigError, match=r"--decoupled-lr is 0.5 here and unset there"):
        continue_schedule(ours, document(), config)
    ours, config = schedule(weight_decay=0.2)
    with pytest.raises(ConfigError, match=r"--end-weight-decay .*is 0.2 here and 0.01 there"):
        continue_schedule(ours, document(), config)


def test_either_side_may_win() -> None:
    ours, config = schedule(min_lr=0.1, override_opt_param_scheduler=True)
    assert continue_schedule(ours, document(), config) == ours
    ours, config = schedule(min_lr=0.1, use_checkpoint_opt_param_scheduler=True)
    assert continue_schedule(ours, document(), config) == schedule()[0]
    with pytest.raises(ConfigError, match="contradict"):
        schedule(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True)
