"""The page of a server, used by a browser without a window: everything on it comes from there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import chromium
from tests.trainyard.serving.running import NAME, Running, running
from trainyard.inference.load import ModelOnRanks

pytestmark = pytest.mark.slow

KEY = "0123456789abcdef0123"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    found = browser.new_page()
    found.set_default_timeout(30_000)
    yield found
    found.close()


def column(page: Any, name: str) -> Any:
    return page.locator(f"[data-column={name}]")


def figures(page: Any, name: str, words: str) -> None:
    """Wait for what the column says in the end."""
    column(page, name).locator(".figures").filter(has_text=re.compile(words)).wait_for()


def test_two_settings_are_compared_on_one_prompt(page: Any, server: Running) -> None:
    faults: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    page.get_by_role("heading", name=NAME).wait_for()
    page.get_by_label("Prompt").fill("the yard <b>")
    page.get_by_label("New tokens").fill("12")
    page.get_by_label("Seed").fill("3")
    page.get_by_role("button", name="Generate").click()
    for name in ("a", "b"):
        figures(page, name, "^12 tokens, first after ")
    fields: dict[str, Any] = {"prompt": "the yard <b>", "max_tokens": 12, "seed": 3}
    settings = {"a": {"temperature": 0.0}, "b": {"temperature": 1.0, "top_p": 0.9}}
    for name, sampling in settings.items():
        reply = server.post("/v1/completions", **fields, **sampling).json()
        shown = column(page, name).locator("output").evaluate("e => e.textContent")
        assert shown == "the yard <b>" + reply["choices"][0]["text"]
    assert all(url.startswith((server.url, "data:")) for url in asked)
    assert faults == []


def test_a_refusal_is_shown_where_the_text_would_be(page: Any, server: Running) -> None:
    page.goto(server.url)
    page.get_by_label("Prompt").fill("a")
    page.get_by_label("New tokens").fill("999")
    page.get_by_role("button", name="Generate").click()
    figures(page, "a", "the model takes 64 together")


def test_the_key_is_asked_for(page: Any, generator: ModelOnRanks) -> None:
    with running(generator, key=KEY) as closed:
        page.goto(closed.url)
        page.get_by_text("send the key of this server").wait_for()
        page.get_by_label("Key").fill(KEY)
        page.get_by_label("Prompt").fill("a")
        page.get_by_label("New tokens").fill("3")
        page.get_by_role("heading", name=NAME).wait_for()
        page.get_by_role("button", name="Generate").click()
        figures(page, "b", "^3 tokens")
