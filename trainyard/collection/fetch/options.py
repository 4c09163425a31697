"""Options of fetching."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from trainyard.config import check_above_zero, check_at_least, check_at_most, execution
from trainyard.errors import ConfigError

AGENT = re.compile(r"[\x20-\x7e]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """How pages are fetched; of --source fetch alone."""

    url_preset: Literal["none", "openwebtext"] = "none"
    """Rules for URLs to leave out. openwebtext: Megatron-LM's blacklist_urls.py."""
    user_agent: str = "trainyard"
    """Who asks; the part before / is the name that robots.txt may have rules for."""
    connections: int = execution(64)
    """Hosts that are asked at the same time; each has one connection."""
    host_delay_seconds: float = execution(1.0)
    """Least time between two requests to a host; its robots.txt may ask for more."""
    request_timeout_seconds: float = 60.0
    """Longest time for an answer; a redirect is one."""
    max_attempts: int = 3
    """Attempts for a page, if the server fails or asks to come back later."""
    max_redirects: int = 5
    """Redirects to follow; each is checked as the first URL is."""
    allow_private_addresses: bool = False
    """Also fetch from private, loopback and other addresses that are not public."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "connections", "max_attempts")
        check_at_most(self, 1000, "connections", "max_attempts")
        check_at_least(self, 0, "host_delay_seconds", "max_redirects")
        check_at_most(self, 20, "max_redirects")
        check_at_most(self, 3600, "host_delay_seconds", "request_timeout_seconds")
        check_above_zero(self, "request_timeout_seconds")
        if not AGENT.fullmatch(self.user_agent) or not self.user_agent.partition("/")[0].strip():
            raise ConfigError(
                f"--user-agent {self.user_agent[:40]!r} must be a name of printable ASCII, such as "
                "trainyard/1.0 (+https://example.org/bot)"
            )
