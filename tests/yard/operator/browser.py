"""The form of a deployment in Prefect's pages, filled in by a browser without a window."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from tests.browser import chromium
from tests.security.attacks import Target
from tests.yard.operator.deployed import BUSY_SECONDS

GENERATIONS = {"v1": "", "v2": "/v2"}
"""Both kinds of pages that a Prefect server has, with their prefix."""
PATIENCE_MS = 30_000


@contextmanager
def browser_page(server: Target) -> Iterator[Any]:
    """A page of a browser that has logged in; skips where there is no Chromium."""
    password = base64.b64encode(server.password.encode()).decode()
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1400, "height": 2200})
        context.add_init_script(f"localStorage.setItem('prefect-password', '{password}')")
        context.set_default_timeout(PATIENCE_MS)
        yield context.new_page()


class Form:
    """The form of one deployment, in one generation of the pages."""

    def __init__(self, page: Any, server: Target, generation: str, deployment: str) -> None:
        self._page = page
        self._is_old = generation == "v1"
        path = f"{GENERATIONS[generation]}/deployments/deployment/{deployment}/run"
        page.goto(f"{server.url}{path}")
        page.get_by_text("profile (Optional)").first.wait_for()

    def fill(self, name: str, text: str) -> None:
        """Type into a field."""
        self._field(name).locator("textarea, input").first.fill(text)

    def write_free(self, name: str, text: str) -> None:
        """Type into a field that offers choices as well."""
        self._field(name).get_by_text("path or URL", exact=True).click()
        self.fill(name, text)

    def choose(self, name: str, text: str) -> None:
        """Choose from a list."""
        control = ".p-select-button__icon" if self._is_old else "[aria-haspopup=listbox]"
        self._field(name).locator(control).first.click()
        option = ".p-select-option" if self._is_old else "[role=option]"
        exact = re.compile(rf"^\s*{re.escape(text)}\s*$")
        self._page.locator(option).filter(has_text=exact).first.click()

    def submit(self) -> str:
        """Request the run, again while the server's database is busy; its id."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            with self._page.expect_response(re.compile("create_flow_run")) as answer:
                self._page.get_by_role("button", name="Submit").click()
            if answer.value.status != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                break
        assert answer.value.status == HTTPStatus.CREATED, answer.value.text()
        return str(answer.value.json()["id"])

    def _field(self, name: str) -> Any:
        label = re.compile(rf"^\s*{name}( \(Optional\))?\s*$")
        if self._is_old:
            named = self._page.locator(".schema-form-property__label", has_text=label)
            return self._page.locator(".schema-form-property").filter(has=named).first
        named = self._page.locator("label", has_text=label)
        return self._page.locator("div.group").filter(has=named).first
