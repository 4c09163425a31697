"""Checks of the store: reachable, conditional writes, clock, no public access."""

from __future__ import annotations

from urllib.parse import urlsplit

from flows.doctor.check import Check, CheckResult, fail, ok, skipped, warn
from flows.doctor.context import FOLDER, YardContext
from trainyard.artifacts import store
from trainyard.artifacts.backends import s3_client
from trainyard.artifacts.store_probe import check_reachable, is_open_to_all, probe, seconds_ahead
from trainyard.artifacts.urls import join
from trainyard.errors import ConfigError, InfrastructureError

CONNECT_SECONDS = 4.0

SKEW_WARNED, SKEW_REFUSED = 30.0, 600.0
"""Seconds: S3 refuses signatures that are 15 minutes off."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")

CLOCK = "run a time service (chrony, systemd-timesyncd) on both machines"


def reach(yard: YardContext) -> CheckResult:
    """The store answers, and lists the root of the yard."""
    where = check_reachable(yard.root, CONNECT_SECONDS)
    # Listing proves more than reading one key: the bucket must exist too.
    count = len(store.list_folder(yard.root))
    return ok(f"{where}: {yard.root} ({count} files at its top)")


def conditions(yard: YardContext) -> CheckResult:
    """Conditional writes win once in a race; all other operations of a stage work."""
    faults = [trial for trial in probe(join(yard.root, FOLDER)) if trial.fault]
    if not faults:
        return ok("create-only and if-match writes are honoured, one winner in every race")
    message = "; ".join(f"{trial.name}: {trial.fault}" for trial in faults)
    if any(trial.is_conditional for trial in faults):
        return fail(
            ConfigError,
            message,
            "two runs could overwrite each other unnoticed: use a store that honours If-None-Match "
            "and If-Match (AWS S3, Ceph RGW, a current SeaweedFS) or a file system",
        )
    return fail(InfrastructureError, message, "see the store's own log")


def clock(yard: YardContext) -> CheckResult:
    """The store's clock agrees with ours."""
    ahead = seconds_ahead(yard.root, CONNECT_SECONDS)
    message = (
        f"the store's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} ours"
    )
    if abs(ahead) >= SKEW_REFUSED:
        return fail(InfrastructureError, f"{message}; S3 refuses signatures 900 s off", CLOCK)
    if abs(ahead) >= SKEW_WARNED:
        return warn(message, CLOCK)
    return ok("the store's clock agrees with ours" if abs(ahead) < 1 else message)


def closed(yard: YardContext) -> CheckResult:
    """The store refuses a listing without credentials."""
    if yard.has_local_store:
        return skipped("a file system has owners and modes")
    if not is_open_to_all(yard.root, CONNECT_SECONDS):
        return ok("a listing without credentials is refused")
    message = "the bucket can be listed without credentials"
    todo = "give the store its keys (SeaweedFS: AWS_ACCESS_KEY_ID, both empty opens it to all)"
    if urlsplit(s3_client.endpoint()).hostname in LOOPBACK:
        return warn(f"{message}, from this machine", todo)
    return fail(ConfigError, message, todo)


CHECKS = (
    Check("store", reach, "the-store", limit_seconds=12.0),
    Check("conditional writes", conditions, "conditional-writes", ("store",), 60.0),
    Check("clock", clock, "clocks", ("store",)),
    Check("store closed", closed, "an-open-store", ("store",)),
)
