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
from typing import Any

from stages.runtime.failure import report_failure
from trainyard import json_text
from trainyard import logging as our_logging
from trainyard.errors import ConfigError, InfrastructureError, TrainyardError
from trainyard.logging import printable

KEY = "TRAINYARD_API_KEY"
ADDRESS = re.compile(r"(https?://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:\d{1,5})?/?(api)?")
ANSWER_SECONDS = 600.0


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
        status, answer = ask(url, {"prompts": [prompt], "tokens_to_generate": int(count[:10])})
        if status == HTTPStatus.OK:
            print("Megatron Response: ")
            print(printable(str(answer["text"][0])))
        else:
            print(f"Error {status}: {printable(str(answer['message']))}")


def ask(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and answer of a request. Raises InfrastructureError if there is no such server."""
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    if KEY in os.environ:
        headers["Authorization"] = f"Bearer {os.environ[KEY]}"
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
            status, text = int(reply.status), reply.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    except (OSError, ValueError) as error:
        raise InfrastructureError(f"{url} does not answer: {error}") from error
    try:
        answer = json_text.loads(text)
    except ValueError:
        answer = None
    key = "text" if status == HTTPStatus.OK else "message"
    if not isinstance(answer, dict) or not answer.get(key):
        raise InfrastructureError(f"{url} is no server of texts: it answers with {text[:80]!r}")
    return status, answer
