"""Links of a run card to the profiles of its training."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.report.card import render
from stages.report.facts import Card
from stages.report.lineage import Lineage
from stages.report.profiles import Profile, profiles_of
from tests.browser import chromium
from tests.flows.browse.test_browse import serving
from tests.stages.html_page import Page, check_sound
from trainyard.artifacts import store
from trainyard.artifacts.urls import join, relative

TRACE, MEMORY = "profile-rank0000-steps-11-12.json.gz", "memory-history-rank0000.pickle"
FILES = {
    TRACE: gzip.compress(b'{"traceEvents": []}', mtime=0),
    MEMORY: b"\x80\x04}.",  # a pickle of {}
    "memory-rank0000.jsonl": b"{}\n",
}
"""In logs/ of a run."""
LINEAGE = Lineage(artifacts=(), edges=(), destination="")


def write_profiles(run_url: str) -> None:
    for name, data in FILES.items():
        store.write_bytes(join(run_url, "logs", name), data)


def card_of(profiles: tuple[Profile, ...]) -> str:
    return render(Card(title="run", lineage=LINEAGE, profiles=profiles))


def links(page: Page) -> list[str | None]:
    return [attributes["href"] for tag, attributes in page.tags if tag == "a"]


def test_a_link_leads_from_the_card_to_the_profile(store_url: str) -> None:
    run = join(store_url, "tiny", "run #1")
    write_profiles(run)
    found = profiles_of(run, join(store_url, "tiny"))
    assert [one.link for one in found] == [
        f"run%20%231/logs/{MEMORY}",
        f"run%20%231/logs/{TRACE}",
    ]
    assert [store.read_bytes(one.url) for one in found] == [FILES[MEMORY], FILES[TRACE]]
    page = check_sound(card_of(found))
    assert links(page) == [one.link for one in found]
    assert page.sections["What was run"].facts == {
        "memory, for pytorch.org/memory_viz": MEMORY,
        "steps, for ui.perfetto.dev": TRACE,
    }
    beside = profiles_of(run, join(store_url, "cards", "x"))
    assert beside[0].link == f"../../tiny/run%20%231/logs/{MEMORY}"
    assert profiles_of(join(store_url, "other"), store_url) == ()


def test_there_is_no_link_into_another_store() -> None:
    for run, card in (("s3://a/run", "cards"), ("runs/x", "s3://a/cards"), ("s3://a/b", "s3://b")):
        assert relative(run, card) is None
    far = Profile("steps", f"s3://a/run/logs/{TRACE}", "")
    page = check_sound(card_of((far,)))
    assert links(page) == []
    assert page.sections["What was run"].facts == {"steps": far.url}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.mark.slow
def test_a_click_downloads_a_profile_from_the_folder_and_through_browse(
    browser: Any, tmp_path: Path
) -> None:
    run = tmp_path / "tiny" / "run #1"
    write_profiles(str(run))
    card = tmp_path / "tiny" / "card.html"
    card.write_text(card_of(profiles_of(str(run), str(card.parent))), "utf-8")
    with serving(str(tmp_path)) as port:
        for url in (card.as_uri(), f"http://127.0.0.1:{port}/tiny/card.html"):
            page = browser.new_page()
            page.goto(url)
            for name in (TRACE, MEMORY):
                with page.expect_download(timeout=30_000) as download:
                    page.get_by_role("link", name=name).click()
                assert download.value.suggested_filename == name
                assert Path(download.value.path()).read_bytes() == FILES[name]
            page.close()
