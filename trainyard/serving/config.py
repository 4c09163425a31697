"""Options of a server: where it listens, its key, its limits. Standard library only."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainyard.config import check_above_zero, check_at_least, check_at_most, execution
from trainyard.errors import ConfigError
from trainyard.hosts import is_of_this_machine

KEY = "TRAINYARD_API_KEY"
"""Variable with the key that clients must send."""
LEAST_KEY_CHARS = 16
DAY_SECONDS = 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where a server listens, and who may use it."""

    port: int = execution(5000)
    """Port to listen on; 0: a free one."""
    host: str = execution("127.0.0.1")
    """Address to listen on. One that other machines reach needs a key: the variable
    TRAINYARD_API_KEY, or --api-key-file."""
    allow_host: tuple[str, ...] = execution(())
    """Further names that requests may be for, such as that of a proxy."""
    api_key_file: str | None = execution(None)
    """File with the key that clients must send, readable by its owner only."""

    def __post_init__(self) -> None:
        """Refuse a port that is none."""
        check_at_least(self, 0, "port")
        check_at_most(self, 65535, "port")

    def api_key(self, environ: Mapping[str, str]) -> str | None:
        """The key of the server; None: it asks for none. Raises ConfigError for a weak or open one,
        and for none at an address that other machines reach."""
        key, source = environ.get(KEY), f"the variable {KEY}"
        if self.api_key_file is not None:
            key, source = _private_text(self.api_key_file), f"--api-key-file {self.api_key_file}"
        if key is None:
            if not is_of_this_machine(self.host):
                raise ConfigError(
                    f"--host {self.host} is open to other machines, and there is no key; give one "
                    f"in the variable {KEY} or with --api-key-file, or leave --host out"
                )
            return None
        if len(key) < LEAST_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"{source} must hold at least {LEAST_KEY_CHARS} printable ASCII characters without "
                "a space, such as those of `openssl rand -hex 20`"
            )
        return key


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitConfig:
    """Limits of the server."""

    max_queued_requests: int = execution(256)
    """Texts that may wait for their turn; further requests get status 429."""
    max_prompts: int = execution(128)
    """Texts of one request: its prompts, times `n` or `best_of`."""
    max_body_bytes: int = execution(4 * 2**20)
    """Size of a request."""
    request_timeout_seconds: float = execution(600.0)
    """A request that takes longer is cancelled."""
    drain_seconds: float = execution(30.0)
    """After SIGTERM: how long running requests may take to finish."""
    log_prompts: bool = execution(False)
    """Write the text of prompts and outputs to the access log."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_at_least(self, 1, "max_queued_requests", "max_prompts", "max_body_bytes")
        check_above_zero(self, "request_timeout_seconds")
        check_at_least(self, 0, "drain_seconds")
        check_at_most(self, DAY_SECONDS, "request_timeout_seconds", "drain_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultsConfig:
    """What a request gets that does not name it."""

    temperature: float = execution(1.0)
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int = execution(0)
    """Choose among this many likeliest tokens; 1 is greedy, 0 is all."""
    top_p: float = execution(0.0)
    """Choose among the likeliest tokens that together reach this probability; 0 is all."""
    seed: int | None = execution(None)
    """Makes the seeds of requests that name none reproducible, in the order of arrival; unset: they
    come from the system."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        check_at_least(self, 0, "temperature", "top_k", "top_p", "seed")
        check_at_most(self, 100, "temperature")
        check_at_most(self, 1, "top_p")
        if self.top_k and self.top_p:
            raise ConfigError(
                f"--top-k {self.top_k} and --top-p {self.top_p} exclude each other; leave one out"
            )


def _private_text(path: str) -> str:
    """The line in a file that others cannot read."""
    try:
        with Path(path).open(encoding="ascii") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(
                    f"--api-key-file {path} can be read by other users (mode {mode:o}); chmod 600 "
                    "it and change the key"
                )
            return file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
