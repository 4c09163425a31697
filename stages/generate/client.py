"""The interactive client of a server, as Megatron-LM's tools/text_generation_cli.py.

    python -m stages.generate HOST:PORT

Asks for prompts and numbers of tokens until the end of the input. A key of the server is in the
variable TRAINYARD_API_KEY. Standard library only."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from stages.runtime.failure import report_failure
from trainyard import json_text
from trainyard import logging as our_logging
from trainyard.errors import ConfigError, InfrastructureError, TrainyardError
from trainyard.logging import one_line, printable, shortened

KEY = "TRAINYARD_API_KEY"
ADDRESS = re.compile(r"(https?://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:\d{1,5})?/?(api)?")
ANSWER_SECONDS = 600.0
MAX_ANSWER_BYTES = 16 * 2**20
MOST_CHARS = 200
"""Of what is shown of an answer that is none."""


def main(words: Sequence[str]) -> int:
    """Talk to a server; returns the exit status."""
    our_logging.configure()
    try:
        talk(url_of(words))
    except (EOFError, KeyboardInterrupt):
        print()
        return 0
    except TrainyardError as error:
        return report_failure("generate", error, debug=False)
    raise AssertionError("a conversation ends with its input")


def url_of(words: Sequence[str]) -> str:
    """The address of the interface that HOST:PORT names."""
    if len(words) != 1:
        raise ConfigError(
            f"{' '.join(words[1:])}: the client of a server takes HOST:PORT and no option"
        )
    found = ADDRESS.fullmatch(words[0])
    if found is None:
        raise ConfigError(f"{words[0]}: name a server as HOST:PORT, such as localhost:5000")
    return f"{found[1] or 'http://'}{found[2]}{found[3] or ''}/api"


def talk(url: str) -> None:
    """Ask and show, until input() raises EOFError."""
    while True:
        prompt = input("Enter prompt: ")
        count = input("Enter number of tokens to generate: ")
        if not count.isdecimal():
            print(f"{count!r} is no number of tokens")
            continue
        status, words = ask(url, {"prompts": [prompt], "tokens_to_generate": int(count[:10])})
        if status == HTTPStatus.OK:
            print("Megatron Response: ")
            print(printable(words))
        else:
            print(f"Error {status}: {printable(words)}")


def ask(url: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status of a request, and the first text of its answer or the message of its error. Raises
    InfrastructureError if there is no such server."""
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    if KEY in os.environ:
        headers["Authorization"] = f"Bearer {os.environ[KEY]}"
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method="PUT")
    try:
        status, content = _exchange(request)
    except (OSError, ValueError, HTTPException) as error:
        why = shortened(one_line(str(error) or type(error).__name__), MOST_CHARS)
        raise InfrastructureError(f"{url} does not answer: {why}") from error
    words = _words(content, "text" if status == HTTPStatus.OK else "message")
    if words is None:
        raise InfrastructureError(f"{url} is no server of texts: it answers with {content[:80]!r}")
    return status, words


def _exchange(request: urllib.request.Request) -> tuple[int, bytes]:
    """Status and content. ValueError for one that is larger than any answer."""
    try:
        reply = urllib.request.urlopen(request, timeout=ANSWER_SECONDS)
    except urllib.error.HTTPError as error:
        reply = error
    with reply:
        content = reply.read(MAX_ANSWER_BYTES + 1)
        if len(content) > MAX_ANSWER_BYTES:
            raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes")
        return int(reply.status), content


def _words(content: bytes, key: str) -> str | None:
    """The text below a key, the first one of several; None in another document."""
    try:
        answer = json_text.loads(content)
    except ValueError:
        return None
    found = answer.get(key) if isinstance(answer, dict) else None
    if isinstance(found, list) and found:
        found = found[0]
    return found if isinstance(found, str) else None
