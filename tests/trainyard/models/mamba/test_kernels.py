"""The choice between torch, Triton and mamba-ssm."""

from __future__ import annotations

import pytest

from trainyard.errors import ConfigError
from trainyard.models.mamba.kernels import MambaBackend, MambaSetting, choose_mamba

CUDA = MambaSetting(device="cuda")
SMALL = MambaSetting(device="cuda", sizes=(8, 128))


def test_auto_takes_the_fastest_that_is_available() -> None:
    assert choose_mamba("auto", CUDA).backend == "triton"
    assert choose_mamba("auto", SMALL).backend == "mamba_ssm"
    lacking = MambaSetting(device="cuda", missing=("causal_conv1d",), has_triton=False)
    found = choose_mamba("auto", lacking)
    assert (found.backend, found.reason) == ("torch", "of triton, Triton is not installed")
    assert choose_mamba("auto", MambaSetting(device="cpu")).backend == "torch"


def test_torch_by_request_is_torch() -> None:
    assert choose_mamba("torch", CUDA).backend == "torch"


@pytest.mark.parametrize(
    ("request_", "setting", "message"),
    [
        ("mamba_ssm", MambaSetting(device="cpu"), "a CUDA device, not cpu"),
        ("mamba_ssm", MambaSetting(device="cuda", missing=("mamba_ssm",)), "mamba-ssm not instal"),
        ("mamba_ssm", MambaSetting(device="cuda", deterministic=True), "--deterministic-mode"),
        ("triton", MambaSetting(device="cuda", has_triton=False), "Triton is not installed"),
        ("triton", SMALL, "--mamba-head-dim 8 and --mamba-state-dim 128 must both be one of 16"),
    ],
)
def test_a_backend_by_request_must_be_available(
    request_: MambaBackend, setting: MambaSetting, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_mamba(request_, setting)
