"""CUDA_DEVICE_MAX_CONNECTIONS is set and logged if products hide communication."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.training.test_pretrain_api import TRAINING, options
from trainyard.errors import ConfigError
from trainyard.parallel.config import ParallelConfig
from trainyard.parallel.data_config import DataParallelConfig
from trainyard.training.loop.prepare import VARIABLE, arrange_connections, prepared

TENSOR = {"tensor_model_parallel_size": 2}
RING = {"context_parallel_size": 2, "cp_comm_type": "p2p"}


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"pipeline_model_parallel_size": 4},
        {"context_parallel_size": 2, "cp_comm_type": "a2a"},
        {"context_parallel_size": 2, "cp_comm_type": "allgather"},
    ],
)
@pytest.mark.parametrize("environ", [{}, {VARIABLE: "8"}])
def test_the_variable_stays_unset_without_hidden_communication(
    parallel: dict[str, Any], environ: dict[str, str]
) -> None:
    before = dict(environ)
    assert arrange_connections(ParallelConfig(**parallel), environ, cuda_started=False) is None
    assert environ == before


@pytest.mark.parametrize(
    ("parallel", "option"),
    [(TENSOR, "--tensor-model-parallel-size 2"), (RING, "--context-parallel-size 2 --cp-comm")],
)
def test_the_variable_is_set_to_one_queue_if_unset(parallel: dict[str, Any], option: str) -> None:
    environ: dict[str, str] = {}
    done = arrange_connections(ParallelConfig(**parallel), environ, cuda_started=False)
    assert done is not None
    assert environ == {VARIABLE: "1"}
    assert not done.is_warning
    assert done.message.startswith(f"{VARIABLE}=1, set by trainyard")
    assert option in done.message


@pytest.mark.parametrize(("value", "is_warning"), [("1", False), ("8", True), ("", True)])
@pytest.mark.parametrize("cuda_started", [False, True])
def test_a_given_value_stays_and_is_logged(
    value: str, is_warning: bool, cuda_started: bool
) -> None:
    environ = {VARIABLE: value}
    done = arrange_connections(ParallelConfig(**TENSOR), environ, cuda_started=cuda_started)
    assert done is not None
    assert environ == {VARIABLE: value}
    assert done.is_warning == is_warning
    assert done.message.startswith(f"{VARIABLE}={value}, from the environment")


def test_a_cuda_that_already_runs_logs_a_warning() -> None:
    environ: dict[str, str] = {}
    done = arrange_connections(ParallelConfig(**TENSOR), environ, cuda_started=True)
    assert done is not None
    assert environ == {}
    assert done.is_warning
    assert "set it to 1 when you start the program" in done.message


@pytest.mark.parametrize("parallel", [{}, TENSOR, RING])
def test_weights_that_are_gathered_need_several_queues(parallel: dict[str, Any]) -> None:
    config = ParallelConfig(**parallel, data_parallel=DataParallelConfig(use_torch_fsdp2=True))
    environ: dict[str, str] = {}
    assert arrange_connections(config, environ, cuda_started=False) is None
    assert environ == {}
    done = arrange_connections(config, {VARIABLE: "1"}, cuda_started=False)
    assert done is not None
    assert done.is_warning
    assert done.message.endswith("should hide it (--use-torch-fsdp2); unset it")


def test_a_cpu_run_leaves_the_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    on_cpu = replace(TRAINING, device="cpu")
    config = options(tmp_path, training=on_cpu, parallel=ParallelConfig(**TENSOR))
    with pytest.raises(ConfigError, match="not fit the layout"), prepared(config):
        raise AssertionError
    assert VARIABLE not in os.environ
