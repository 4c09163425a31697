"""Environment variables that a document may name, as `${NAME}`.

The value lands in logs, folder names and the records of a run, so a variable that looks like a
secret is refused. The one list of such names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainyard.errors import ConfigError

OF_PREFECT = "PREFECT_"
"""Prefix of Prefect's variables. Stages do not inherit them: their password lets a stage start
programs on the workers."""

SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|APIKEY|"
    r"(^|_)(PG)?PASS(_|FILE|$)|"
    r"(^|_)(TOKEN|KEYS?|AUTH|AUTH_STRING|JWT|COOKIES?|CREDS|DSN|PAT|WEBHOOK|NETRC)(_|$)|"
    r"_(PWD|PW)(_|$)|"
    r"(DATABASE|(^|_)DB|SQL|SQLALCHEMY|POSTGRES|REDIS|MONGO|MONGODB|BROKER|AMQP|NOTIFY|CONNECTION)"
    r"_(URL|URI|STRING)(_|$)"
)
"""Found in names of variables, in upper case, whose values are secrets."""


def looks_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return SECRET.search(name.upper()) is not None


def variable(name: str, environ: Mapping[str, str], where: str) -> str | None:
    """The value of a variable that a document names; None if it is not set.

    Raises ConfigError that begins with `where` for a variable of Prefect, one that looks like a
    secret, and one whose value is a URL with a password."""
    if name.upper().startswith(OF_PREFECT):
        reason = "is a variable of Prefect, which no document may read"
    elif looks_secret(name):
        reason = "looks like a secret, which no document may read"
    elif _has_password(environ.get(name, "")):
        reason = "holds a URL with a password, which no document may read"
    else:
        return environ.get(name)
    raise ConfigError(
        f"{where}: the variable {name} {reason}: its value would appear in logs and names of "
        f"folders; leave it out, as a stage reads credentials from its own environment"
    )


def _has_password(value: str) -> bool:
    user, at, _ = value.partition("://")[2].rpartition("@")
    return bool(at) and ":" in user
