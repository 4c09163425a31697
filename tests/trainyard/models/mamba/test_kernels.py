"""The choice between torch and mamba-ssm."""

from __future__ import annotations

import pytest

from trainyard.errors import ConfigError
from trainyard.models.mamba.kernels import choose_mamba


def test_auto_takes_mamba_ssm_where_it_is() -> None:
    assert choose_mamba("auto", "cuda", (), deterministic=False).backend == "mamba_ssm"
    assert choose_mamba("auto", "cpu", (), deterministic=False).backend == "torch"
    assert choose_mamba("auto", "cuda", (), deterministic=True).backend == "torch"
    lacking = choose_mamba("auto", "cuda", ("causal_conv1d",), deterministic=False)
    assert (lacking.backend, lacking.reason) == ("torch", "causal-conv1d not installed")


def test_torch_by_request_is_torch() -> None:
    assert choose_mamba("torch", "cuda", (), deterministic=False).backend == "torch"


@pytest.mark.parametrize(
    ("device", "missing", "message"),
    [("cpu", (), "a CUDA device, not cpu"), ("cuda", ("mamba_ssm",), "mamba-ssm not installed")],
)
def test_mamba_ssm_by_request_must_be_there(
    device: str, missing: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_mamba("mamba_ssm", device, missing, deterministic=False)
