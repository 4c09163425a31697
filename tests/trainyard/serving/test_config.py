"""Options of a server: an open address needs a key, and a key must be one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import ConfigError
from trainyard.serving.config import KEY, DefaultsConfig, LimitConfig, ListenConfig

GOOD = "0123456789abcdef"


def test_this_machine_alone_needs_no_key() -> None:
    assert ListenConfig().api_key({}) is None
    assert ListenConfig(host="::1").api_key({}) is None
    assert ListenConfig().api_key({KEY: GOOD}) == GOOD


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node7", "localhost.evil.example"])
def test_an_address_that_others_reach_needs_one(host: str) -> None:
    with pytest.raises(ConfigError, match="there is no key"):
        ListenConfig(host=host).api_key({})
    assert ListenConfig(host=host).api_key({KEY: GOOD}) == GOOD


@pytest.mark.parametrize("key", ["", "short", "a" * 15, "p\xe4ssword" * 4, "two words " * 3])
def test_a_weak_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="at least 16 printable") as caught:
        ListenConfig().api_key({KEY: key})
    assert not key or key not in str(caught.value)


def test_a_key_comes_from_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(GOOD + "\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        ListenConfig(api_key_file=str(file)).api_key({})
    file.chmod(0o600)
    assert ListenConfig(api_key_file=str(file)).api_key({KEY: "f" * 20}) == GOOD
    with pytest.raises(ConfigError, match="cannot be read"):
        ListenConfig(api_key_file=str(tmp_path / "none")).api_key({})


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (ListenConfig, {"port": 65536}, "--port"),
        (LimitConfig, {"max_body_bytes": 0}, "--max-body-bytes"),
        (LimitConfig, {"request_timeout_seconds": 0.0}, "--request-timeout-seconds"),
        (LimitConfig, {"drain_seconds": -1.0}, "--drain-seconds"),
        (DefaultsConfig, {"top_p": 1.5}, "--top-p"),
        (DefaultsConfig, {"top_p": 0.5, "top_k": 2}, "exclude each other"),
    ],
)
def test_values_out_of_range_are_refused(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(**options)
