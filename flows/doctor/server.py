"""Checks of Prefect's server: reachable, of our version, with a password, a pool and a worker."""

from __future__ import annotations

import base64
import urllib.error
import urllib.request
import uuid
from functools import cache
from importlib.metadata import version
from typing import Any
from urllib.parse import quote, urlsplit

from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, PREFECT_API_URL

from flows.doctor.check import Check, CheckResult, fail, ok, skipped, warn
from flows.doctor.context import YardContext
from flows.doctor.store import LOOPBACK
from trainyard import json_text
from trainyard.artifacts.urls import show_url
from trainyard.errors import ConfigError, InfrastructureError

SECONDS = 5.0

CREDENTIALS = (
    "PREFECT_API_AUTH_STRING (user:password, as the server's PREFECT_SERVER_API_AUTH_STRING)"
)

REFUSED = (401, 403)


def reach(yard: YardContext) -> CheckResult:
    """A server answers at PREFECT_API_URL."""
    url = api_url()
    if not url:
        message = "PREFECT_API_URL is not set"
        if yard.runs_here:
            return skipped(f"{message}: each flow started by hand starts its own server")
        return fail(
            ConfigError, message, "export PREFECT_API_URL=http://HOST:4200/api, as for the worker"
        )
    status, _ = ask("/health")
    if status != 200:
        message = f"{show_url(url)} answers {status}: that is no Prefect server"
        return fail(ConfigError, message, "correct PREFECT_API_URL; it ends in /api")
    return ok(show_url(url))


def versions(yard: YardContext) -> CheckResult:
    """Client and server have the same version of Prefect: an older server lacks features."""
    status, body = ask("/admin/version")
    if status in REFUSED:
        return fail(
            ConfigError, f"the server refuses our credentials ({status})", f"set {CREDENTIALS}"
        )
    here, there = version("prefect"), str(body)
    if status != 200:
        return fail(InfrastructureError, f"the server's version: answer {status}", "see its log")
    if here == there:
        return ok(f"prefect {here} here and on the server")
    message = f"prefect {here} here, {there} on the server"
    todo = f"pip install prefect=={there}, or upgrade the server (docs/operate.md)"
    if here.split(".")[:2] != there.split(".")[:2]:
        return fail(ConfigError, message, todo)
    return warn(message, todo)


def closed(yard: YardContext) -> CheckResult:
    """The server refuses requests without credentials, because a deployment can run programs."""
    status, _ = ask("/admin/version", with_credentials=False)
    if status in REFUSED:
        return ok(f"a request without credentials is refused; {_csrf()}")
    message = "no authentication: any client of the server can start programs on the workers"
    todo = f"set {CREDENTIALS} on the server, on workers and here"
    if yard.runs_here and urlsplit(api_url()).hostname in LOOPBACK:
        return warn(
            f"{message}; it listens on this machine only, which other users and browsers can reach",
            f"use `make ui`, which has a password, or {todo}",
        )
    return fail(ConfigError, message, todo)


def _csrf() -> str:
    status, _ = ask(f"/csrf-token?client={uuid.uuid4()}")
    return "CSRF protection is on" if status == 200 else "CSRF protection is off"


def pool(yard: YardContext) -> CheckResult:
    """The yard's work pool exists, and a worker polls it."""
    name = yard.profile.pool.name
    register = f"python -m flows.register --profile {yard.profile.name}"
    status, body = ask(f"/work_pools/{quote(name)}")
    if status == 404:
        if yard.runs_here:
            return skipped(f"no work pool {name}; {register} creates it")
        return fail(ConfigError, f"no work pool {name}", f"{register} creates it")
    if status != 200 or not isinstance(body, dict):
        return fail(
            InfrastructureError, f"work pool {name}: answer {status}", "see the server's log"
        )
    state = body.get("status")
    if body.get("is_paused"):
        return warn(f"work pool {name} is paused", f"prefect work-pool resume {name}")
    if state == "READY":
        return ok(f"work pool {name} has a worker")
    return fail(
        InfrastructureError,
        f"work pool {name} has no worker: flow runs stay scheduled",
        f"python -m flows.worker --pool {name}, as a service that restarts",
    )


# --- asking -------------------------------------------------------------------------------------


def api_url() -> str:
    """The server's URL, from the environment or Prefect's profile; empty if none is set."""
    return str(PREFECT_API_URL.value() or "").rstrip("/")


def ask(path: str, with_credentials: bool = True) -> tuple[int, Any]:
    """Status and document of a GET; InfrastructureError without an answer within `SECONDS`."""
    headers = {"Accept": "application/json", **(_credentials() if with_credentials else {})}
    request = urllib.request.Request(api_url() + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return reply.status, _document(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None
    except ValueError:
        raise ConfigError(f"PREFECT_API_URL={show_url(api_url())} is not a URL") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise InfrastructureError(
            f"{show_url(api_url())} does not answer ({reason}); start the server (docker compose "
            "up -d, or make ui), or correct PREFECT_API_URL"
        ) from error


def _document(data: bytes) -> Any:
    try:
        return json_text.loads(data)
    except ValueError:
        return None


@cache
def _credentials() -> dict[str, str]:
    key, text = _plain(PREFECT_API_KEY.value()), _plain(PREFECT_API_AUTH_STRING.value())
    if key:
        return {"Authorization": f"Bearer {key}"}
    if text:
        encoded = base64.b64encode(text.encode()).decode()
        return {"Authorization": f"Basic {encoded}"}
    return {}


def _plain(secret: Any) -> str:
    """A setting of Prefect, which some versions wrap in a SecretStr."""
    shown = secret.get_secret_value() if hasattr(secret, "get_secret_value") else secret
    return str(shown or "")


CHECKS = (
    Check("Prefect", reach, "the-prefect-server"),
    Check("versions", versions, "versions", ("Prefect",)),
    Check("auth", closed, "authentication", ("Prefect",)),
    Check("work pool", pool, "no-worker", ("Prefect", "versions")),
)
