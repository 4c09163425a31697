"""Which rates go on after a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainyard.errors import ConfigError
from trainyard.optim.config import OptimizerConfig
from trainyard.optim.schedule import OptimizerSchedule, build_optimizer_schedule
from trainyard.optim.schedule_resume import optimizer_schedule_document, resume_optimizer_schedule


def schedule(**options: Any) -> tuple[OptimizerSchedule, OptimizerConfig]:
    config = OptimizerConfig(**{"lr": 1.0, **options})
    return build_optimizer_schedule(config, 100, 4), config


def document(**options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        json.dumps(optimizer_schedule_document(schedule(**options)[0]))
    )
    return found


@pytest.mark.parametrize("options", [{}, {"decoupled_lr": 0.5}, {"lr_warmup_fraction": 0.25}])
def test_equal_rates_go_on(options: dict[str, Any]) -> None:
    ours, config = schedule(**options)
    assert resume_optimizer_schedule(ours, document(**options), config) == ours


def test_differing_rates_are_refused_and_all_named() -> None:
    ours, config = schedule(min_lr=0.1, lr_decay_style="cosine")
    words = r"--min-lr is 0.1 here and 0.0 there; --lr-decay-style is cosine here and linear there"
    with pytest.raises(ConfigError, match=words):
        resume_optimizer_schedule(ours, document(), config)
    with pytest.raises(ConfigError, match="--override-opt-param-scheduler"):
        resume_optimizer_schedule(ours, document(), config)
    ours, config = schedule(decoupled_lr=0.5)
    with pytest.raises(ConfigError, match=r"--decoupled-lr is 0.5 here and unset there"):
        resume_optimizer_schedule(ours, document(), config)
    ours, config = schedule(weight_decay=0.2)
    with pytest.raises(ConfigError, match=r"--end-weight-decay .*is 0.2 here and 0.01 there"):
        resume_optimizer_schedule(ours, document(), config)


def test_either_side_may_win() -> None:
    ours, config = schedule(min_lr=0.1, override_opt_param_scheduler=True)
    assert resume_optimizer_schedule(ours, document(), config) == ours
    ours, config = schedule(min_lr=0.1, use_checkpoint_opt_param_scheduler=True)
    assert resume_optimizer_schedule(ours, document(), config) == schedule()[0]
    with pytest.raises(ConfigError, match="contradict"):
        schedule(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True)
