"""An OpenAI-compatible server as the target of a load test: its streams of completions or chats.

A time is taken once for each read from the socket, before its bytes are looked at: tokens that
arrive together count as arriving together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import aiohttp

from trainyard import json_text
from trainyard.config import MAX_SIZE
from trainyard.errors import InfrastructureError
from trainyard.load_test.driver import CLOCK, Answer, RequestError
from trainyard.load_test.event_stream import EventStream
from trainyard.load_test.workload import PlannedRequest
from trainyard.logging import one_line

Endpoint = Literal["completions", "chat"]
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

MAX_MESSAGE = 200
"""Characters of a server's message that are kept."""

MAX_ERROR_BYTES = 64 * 1024

Piece = tuple[str, str | None]
"""Text and reason of the end."""


class HttpTarget:
    """Use it in `async with`."""

    def __init__(
        self,
        url: str,
        endpoint: Endpoint,
        model: str,
        options: Mapping[str, Any],
        *,
        seed: int | None,
        api_key: str | None = None,
    ) -> None:
        """url: without the path of the endpoint. options: further keys of each request's body.
        seed: each request has this one plus its index; None: no seed is sent."""
        self._url, self._endpoint, self.model = base_url(url), endpoint, model
        self._options, self._seed = dict(options), seed
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    async def __aenter__(self) -> HttpTarget:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # As many connections as requests: a pool that waits would hide the server's queue.
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def served_model(self) -> str:
        """The first name of /v1/models. InfrastructureError if there is no answer with one."""
        url = self._url + "/v1/models"
        try:
            limit = aiohttp.ClientTimeout(total=30)
            async with self._session.get(url, timeout=limit, allow_redirects=False) as response:
                if response.status != 200:
                    raise InfrastructureError(f"--url: {url} answers {await _message(response)}")
                document = json_text.loads(await response.content.read(MAX_ERROR_BYTES))
            name = document["data"][0]["id"]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise InfrastructureError(f"--url: {url} does not answer: {_reason(error)}") from None
        except (ValueError, LookupError, TypeError):
            raise InfrastructureError(
                f"--url: {url} does not list a model; name one with --model"
            ) from None
        return str(name)

    def use_model(self, name: str) -> None:
        """Ask for this model from now on."""
        self.model = name

    async def send(self, request: PlannedRequest, answer: Answer) -> None:
        """See `Target`."""
        body = self.body(request)
        try:
            url = self._url + PATHS[self._endpoint]
            # A redirect would measure, and send the prompts to, a server that nobody named.
            async with self._session.post(url, json=body, allow_redirects=False) as response:
                if response.status != 200:
                    raise RequestError(await _message(response))
                if response.content_type != "text/event-stream":
                    raise RequestError(f"answered with {response.content_type}, not with a stream")
                await self._read(response, answer)
        except (aiohttp.ClientError, OSError) as error:
            raise RequestError(_reason(error)) from None

    def body(self, request: PlannedRequest) -> dict[str, Any]:
        """The document that asks for a request."""
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        if self._endpoint == "chat":
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        else:
            asked = {"prompt": prompt}
        if self._seed is not None:
            asked["seed"] = self._seed + request.index
        return {
            "model": self.model,
            **asked,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        events = EventStream()
        is_finished = False
        try:
            async for piece in response.content.iter_any():
                at = CLOCK()
                for document in events.feed(piece):
                    is_finished |= take_event(document, at, answer)
        except ValueError as error:
            raise RequestError(f"no event stream: {_short(str(error))}") from None
        if not (events.is_done or is_finished):
            raise RequestError("the stream broke off before its end")


def take_event(document: Any, at: float, answer: Answer) -> bool:
    """Report what an event of either endpoint says; True if it ends the output. RequestError for an
    error that came in the stream, or for what is no event of these endpoints."""
    if not isinstance(document, dict):
        raise RequestError("an event of the stream is no object")
    if document.get("error") is not None:
        raise RequestError(f"error in the stream: {_short(_words(document))}")
    choices = document.get("choices") or []
    if not isinstance(choices, list):
        raise RequestError("the choices of an event are no list")
    is_finished = False
    for choice in choices:
        is_finished |= _take_choice(choice, at, answer)
    usage = document.get("usage")
    if isinstance(usage, dict) and (output := _count(usage, "completion_tokens")) is not None:
        answer.on_usage(_count(usage, "prompt_tokens"), output)
    return is_finished


def _take_choice(choice: Any, at: float, answer: Answer) -> bool:
    # The first event of a chat names the role, with no or an empty text: it is no token.
    delta = choice.get("delta") or {} if isinstance(choice, dict) else None
    if not isinstance(delta, dict):
        raise RequestError("a choice in the stream is no object")
    if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
        answer.on_text(at, 1)
    if choice.get("finish_reason") is None:
        return False
    answer.on_finish(_short(str(choice["finish_reason"])))
    return True


def _count(usage: Mapping[str, Any], key: str) -> int | None:
    """A number of tokens; None if the server does not say one."""
    count = usage.get(key)
    if type(count) is not int:
        return None
    if not 0 <= count <= MAX_SIZE:
        raise RequestError(f"{key!r} in the stream is no number of tokens")
    return count


def base_url(url: str) -> str:
    """Without a slash at the end, or the /v1 that clients of the interface are often given."""
    return url.rstrip("/").removesuffix("/v1")


async def _message(response: aiohttp.ClientResponse) -> str:
    """The status, and what the server says about it."""
    body = await response.content.read(MAX_ERROR_BYTES)
    try:
        said = _words(json_text.loads(body))
    except ValueError:
        said = body.decode(errors="replace")
    return f"HTTP {response.status}: {_short(said)}" if said else f"HTTP {response.status}"


def _words(document: Any) -> str:
    """The message of an error, in the places where servers write it."""
    error = document.get("error", document) if isinstance(document, dict) else document
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)


def _reason(error: Exception) -> str:
    """One line for all errors of a kind: without ports of this side."""
    text = str(error)
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno is not None:
        # asyncio's words leave out why, as in "Connect call failed ('127.0.0.1', 9)".
        text = re.sub(r"Connect call failed \([^()]*\)", os.strerror(error.os_error.errno), text)
    return _short(re.sub(r"\('[^()]*\)", "", text)) or type(error).__name__


def _short(text: str) -> str:
    line = one_line(" ".join(text.split()))
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "..."
