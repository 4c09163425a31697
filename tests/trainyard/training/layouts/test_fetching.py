"""With --overlap-param-gather no parameter is read before it has come.

What is yet to come is not a number here, and comes as late as it can: when it is waited for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.trainyard.training.layouts import runs
from tests.trainyard.training.layouts.cases import Cut
from tests.trainyard.training.layouts.compare import assert_same_bits
from tests.trainyard.training.layouts.runs import Share, run_of, together, train
from trainyard.parallel.data import param_gather
from trainyard.testing.pool import RankPool
from trainyard.training.loop.build import build_train_module

STEPS = 2


class Late:
    """A gathering that is done when it is waited for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._call = arguments, options

    def wait(self) -> None:
        arguments, options = self._call
        _all_gather(*arguments, **options).wait()


_all_gather = param_gather.all_gather_single
_begin = param_gather.ParameterGather.begin


def begin_without_the_others(self: param_gather.ParameterGather) -> None:
    """Forget what other ranks own, then fetch it."""
    for bucket in self._buckets:
        own = bucket.own_params.clone()
        bucket.params.fill_(torch.nan)
        bucket.own_params.copy_(own)
    _begin(self)


def train_with_late_parameters(cut: Cut, as_compiled: bool) -> Share:
    """as_compiled: the modules wait that do where layers are compiled; here they are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(param_gather, "all_gather_single", Late)
        patch.setattr(param_gather.ParameterGather, "begin", begin_without_the_others)
        patch.setattr(torch, "compile", lambda forward, **_: forward)
        patch.setattr(
            runs, "build_train_module", partial(build_train_module, compile_layers=as_compiled)
        )
        return train(cut, STEPS)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("as_compiled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
def test_no_parameter_is_read_before_it_is_gathered(
    pp: int, tied: bool, as_compiled: bool, ranks: RankPool
) -> None:
    cut = Cut(dp=2, pp=pp, tied=tied, bucket_size=1, reduction="zero overlap")
    expected = run_of(replace(cut, reduction="zero"), ranks, STEPS)
    shares = ranks.run(train_with_late_parameters, cut.world_size, cut, as_compiled)
    assert_same_bits(together(shares), expected)
