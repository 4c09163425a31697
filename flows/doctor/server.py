"""Prefect's server: reachable, of this client's version, closed to strangers, with a pool and a
worker that serves it."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
import uuid
from functools import cache
from importlib.metadata import version
from typing import Any
from urllib.parse import quote, urlsplit

from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, PREFECT_API_URL

from flows.doctor.check import Answer, Check, fail, ok, skipped, warn
from flows.doctor.context import YardContext
from flows.doctor.store import LOOPBACK
from trainyard.errors import ConfigError, InfrastructureError

SECONDS = 5.0

CREDENTIALS = (
    "PREFECT_API_AUTH_STRING (user:password, as the server's PREFECT_SERVER_API_AUTH_STRING)"
)

REFUSED = (401, 403)


def reach(yard: YardContext) -> Answer:
    """A server answers at PREFECT_API_URL."""
    url = api_url()
    if not url:
        told = "PREFECT_API_URL is not set"
        if yard.runs_here:
            return skipped(f"{told}: each flow that is typed starts a server of its own")
        return fail(
            ConfigError, told, "export PREFECT_API_URL=http://HOST:4200/api, as for the worker"
        )
    status, _ = ask("/health")
    if status != 200:
        told = f"{url} answers {status}: that is no Prefect server"
        return fail(ConfigError, told, "correct PREFECT_API_URL; it ends in /api")
    return ok(url)


def versions(yard: YardContext) -> Answer:
    """The same Prefect here and there; a newer client asks an older server for what it has not."""
    status, body = ask("/admin/version")
    if status in REFUSED:
        return fail(
            ConfigError, f"the server refuses our credentials ({status})", f"set {CREDENTIALS}"
        )
    here, there = version("prefect"), str(body)
    if status != 200:
        return fail(InfrastructureError, f"the server's version: answer {status}", "see its log")
    if here == there:
        return ok(f"prefect {here} here and there")
    told = f"prefect {here} here, {there} on the server"
    todo = f"pip install prefect=={there}, or upgrade the server (docs/operate.md)"
    if here.split(".")[:2] != there.split(".")[:2]:
        return fail(ConfigError, told, todo)
    return warn(told, todo)


def closed(yard: YardContext) -> Answer:
    """Nothing is told, and nothing started, without credentials: a deployment is a program."""
    status, _ = ask("/admin/version", with_credentials=False)
    if status in REFUSED:
        return ok(f"a request without credentials is refused; {_csrf()}")
    told = "anybody who reaches the server can start programs on the workers: no authentication"
    todo = f"set {CREDENTIALS} on the server, on workers and here"
    if yard.runs_here and urlsplit(api_url()).hostname in LOOPBACK:
        return warn(
            f"{told}; it listens to this machine alone, whose other users and browsers reach it",
            f"take that of `make ui`, which has a password, or {todo}",
        )
    return fail(ConfigError, told, todo)


def _csrf() -> str:
    status, _ = ask(f"/csrf-token?client={uuid.uuid4()}")
    return "CSRF protection is on" if status == 200 else "CSRF protection is off"


def pool(yard: YardContext) -> Answer:
    """The yard's work pool is there, and a worker looks at it."""
    name = yard.profile.pool.name
    register = f"python -m flows.register --yard {yard.profile.name}"
    status, body = ask(f"/work_pools/{quote(name)}")
    if status == 404:
        if yard.runs_here:
            return skipped(f"there is no work pool {name}; {register} makes it")
        return fail(ConfigError, f"there is no work pool {name}", f"{register} makes it")
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
        f"prefect worker start --pool {name}, as a service that is started again",
    )


# --- asking -------------------------------------------------------------------------------------


def api_url() -> str:
    """Where the server is, by the environment or Prefect's profile; empty for nowhere."""
    return str(PREFECT_API_URL.value() or "").rstrip("/")


def ask(path: str, with_credentials: bool = True) -> tuple[int, Any]:
    """Status and document of a GET; InfrastructureError when nobody answers within seconds."""
    headers = {"Accept": "application/json", **(_credentials() if with_credentials else {})}
    request = urllib.request.Request(api_url() + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return reply.status, _document(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None
    except ValueError as error:
        raise ConfigError(f"PREFECT_API_URL={api_url()} is not a URL: {error}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise InfrastructureError(
            f"{api_url()} does not answer ({reason}); start the server (docker compose up -d, or "
            f"make ui), or correct PREFECT_API_URL"
        ) from error


def _document(data: bytes) -> Any:
    try:
        return json.loads(data)
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
    """A setting of Prefect's, which some versions hide in a SecretStr and others do not."""
    shown = secret.get_secret_value() if hasattr(secret, "get_secret_value") else secret
    return str(shown or "")


CHECKS = (
    Check("Prefect", reach, "the-prefect-server"),
    Check("versions", versions, "versions", ("Prefect",)),
    Check("auth", closed, "authentication", ("Prefect",)),
    Check("work pool", pool, "no-worker", ("Prefect", "versions")),
)
