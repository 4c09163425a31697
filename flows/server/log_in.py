"""Passes the password of Prefect's pages to a browser without typing.

A file that only the owner of the yard can open redirects to a page of the server. The password
follows the # of that address, which no browser sends. A script of the page stores it where
Prefect's own login does."""

from __future__ import annotations

import base64
import hashlib
from http import HTTPStatus

from flows.server.guard import App, Message, Receive, Send, answer

PATH = "/trainyard/log-in"

SCRIPT = """
const word = location.hash.slice(1);
fetch("/api/admin/version", {headers: {Authorization: "Basic " + word}}).then(reply => {
  if (reply.ok) localStorage.setItem("prefect-password", word);
  location.replace("/");
});
"""
"""A wrong password changes nothing, since a foreign page may redirect here too."""
PAGE = f"<!DOCTYPE html><title>Prefect</title><script>{SCRIPT}</script>\n".encode()

_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest())
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; connect-src 'self'; script-src 'sha256-" + _DIGEST + b"'",
    ),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


class LogIn:
    """Adds the log-in page to an application."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == PATH:
            await answer(send, HTTPStatus.OK, PAGE, b"text/html", *HEADERS)
        else:
            await self._app(scope, receive, send)


def leading_page(server: str, password: str) -> str:
    """The file that redirects a browser to the log-in page. server: its URL without a path."""
    url = f"{server}{PATH}#{base64.b64encode(password.encode()).decode()}"
    return (
        '<!DOCTYPE html><meta name="referrer" content="no-referrer"><title>Prefect</title>\n'
        f'<meta http-equiv="refresh" content="0; url={url}">\n'
        f'<a href="{url}">Prefect\'s pages</a>\n'
    )
