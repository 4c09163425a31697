"""From a list of URLs to documents: fetch and warc, folders of HTML, shares, and a kill between."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from stages.collect import fetch
from stages.collect import run as collect_run
from stages.collect.config import CollectConfig
from stages.runtime.cli import stage_main
from tests.stages.clean_runs import contents, rows, write
from tests.stages.directly import run_directly
from tests.trainyard.collection.fetch.bad_server import BadServer
from tests.trainyard.collection.sources.warcs import Warc, html
from trainyard.artifacts import store
from trainyard.corpus import unit_sizes
from trainyard.errors import ConfigError

FETCH = {"source": "fetch", "allow_private_addresses": True, "host_delay_seconds": 0.0}


def collect(given: Path | str, folder: Path | str, **options: Any) -> dict[str, Any]:
    words = {"input": [str(given)], "output_dir": str(folder), "workers": 1, **options}
    return run_directly(CollectConfig, collect_run.run, **words)


def pages(folder: Path | str) -> dict[str, bytes]:
    """The files of pages and of what was dropped."""
    names = [n for n in store.list_files(str(folder)) if n.startswith(("pages-", "dropped-"))]
    return {name: store.read_bytes(store.join(str(folder), name)) for name in sorted(names)}


@pytest.mark.slow
def test_a_list_of_urls_becomes_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store_url: str
) -> None:
    monkeypatch.setattr(fetch, "BATCH_BYTES", 200)
    with BadServer() as server:
        wanted = [server.url(f"/page/{number}") for number in range(12)]
        lines = [*wanted, wanted[2], server.url("/chain/2"), server.url("/404"), "mailto:a@b"]
        (tmp_path / "urls.txt").write_text("\n".join(lines) + "\n")
        folder = store.join(store_url, "pages")
        metrics = collect(tmp_path / "urls.txt", folder, **FETCH)
        assert metrics["documents"] == len(lines)
        assert metrics["kept_documents"] == 13
        dropped = {row["url"]: row["dropped"] for row in rows(folder, "dropped")}
        assert {url: one["rule"] for url, one in dropped.items()} == {
            wanted[2]: "duplicate_url",
            server.url("/404"): "status",
            "mailto:a@b": "scheme",
        }
        assert dropped[server.url("/404")]["attempts"] == ["status 404"]
        assert len(pages(folder)) == 4  # three batches
        collect(store.join(folder, "pages-*.warc.gz"), tmp_path / "out", source="warc")
        documents = {row["url"]: row for row in rows(tmp_path / "out", "documents")}
        assert list(documents) == [*wanted, server.url("/chain/0")]
        assert documents[server.url("/chain/0")]["listed_url"] == server.url("/chain/2")
        for row in documents.values():
            assert row["title"] == "A page"
            assert "Words of a page, paragraph 3," in row["text"]
            assert row["date"] == "2026-11-01T00:00:00Z"
        again = collect(store.join(folder, "dropped-*.jsonl"), tmp_path / "again", **FETCH)
        assert again["documents"] == 3
        assert again["kept_documents"] == 1  # the page that was listed twice


@pytest.mark.slow
def test_a_run_after_a_kill_asks_only_for_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "BATCH_BYTES", 200)
    with BadServer() as server:
        urls = [server.url(f"/page/{number}") for number in range(20)]
        (tmp_path / "urls.txt").write_text("\n".join(urls) + "\n")
        collect(tmp_path / "urls.txt", tmp_path / "whole", **FETCH)
        server.asked.clear()
        done = fetch.PageWriter.write
        left = [12]

        def dies(self: Any, *more: Any) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            done(self, *more)

        monkeypatch.setattr(fetch.PageWriter, "write", dies)
        with pytest.raises(KeyboardInterrupt):
            collect(tmp_path / "urls.txt", tmp_path / "cut", **FETCH)
        monkeypatch.setattr(fetch.PageWriter, "write", done)
        before = len(server.asked)
        collect(tmp_path / "urls.txt", tmp_path / "cut", **FETCH)
        assert 0 < len(server.asked) - before < 20
    assert pages(tmp_path / "cut") == pages(tmp_path / "whole")


def test_rules_for_urls_need_no_network(tmp_path: Path) -> None:
    urls = ["https://reddit.com/r/a", "https://a.org/b.pdf", "http://a b", "http://a"]
    write(tmp_path / "urls.jsonl", [{"url": url} for url in urls])
    metrics = collect(tmp_path / "urls.jsonl", tmp_path / "out", **FETCH, url_preset="openwebtext")
    assert metrics["kept_documents"] == 0
    assert [row["dropped"]["rule"] for row in rows(tmp_path / "out", "dropped")] == [
        *("blacklisted_domain", "blacklisted_suffix", "malformed_url", "short_url"),
    ]


def test_fetching_in_shares_is_refused() -> None:
    with pytest.raises(ConfigError, match="--world-size is not for --source fetch"):
        CollectConfig(output_dir="o", source="fetch", input=("a",), rank=0, world_size=2)
    with pytest.raises(ConfigError, match="--url-preset is not for --source html; it is for fetch"):
        run_directly(
            CollectConfig,
            collect_run.run,
            output_dir="o",
            source="html",
            input=["a"],
            url_preset="openwebtext",
        )


@pytest.mark.slow
def test_folders_of_html_in_shares_are_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for number in range(6):
        page = html(f"Page {number}", f"Words of page {number}").encode()
        name = f"{'sub/' if number % 2 else ''}{number}.html"
        (folder / name).write_bytes(page)
    (folder / "packed.html.gz").write_bytes(gzip.compress(html("Packed", "Words").encode()))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "empty.html").write_text("<html></html>")
    metrics = collect(folder, tmp_path / "whole", source="html")
    assert (metrics["documents"], metrics["kept_documents"]) == (8, 7)
    found = {row["id"]: row for row in rows(tmp_path / "whole", "documents")}
    assert found["sub/3.html"]["title"] == "Page 3"
    assert "Words of page 3, paragraph 2," in found["sub/3.html"]["text"]
    assert found["sub/3.html"]["origin"]["file"] == "sub/3.html"
    words = ["--source", "html", "--input", str(folder), "--workers", "1"]
    words += ["--output-dir", str(tmp_path / "joined"), "--world-size", "2"]
    for share in (["--rank", "1"], ["--rank", "0"], []):
        assert stage_main("collect", CollectConfig, "stages.collect.run", argv=words + share) == 0
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_warc_files_in_shares_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_sizes, "UNIT_BYTES", 2000)
    warc = Warc(tmp_path / "a.warc.gz")
    for number in range(12):
        warc.response(f"https://a/{number}", html(f"Page {number}", f"Words {number}").encode())
        warc.record("request", f"https://a/{number}", b"GET / HTTP/1.1\r\n\r\n")
    warc.close()
    metrics = collect(tmp_path / "a.warc.gz", tmp_path / "whole", source="warc")
    assert (metrics["documents"], metrics["kept_documents"]) == (24, 12)
    assert metrics["dropped"]["record_type"] == 12
    titles = [row["title"] for row in rows(tmp_path / "whole", "documents")]
    assert titles == [f"Page {number}" for number in range(12)]
    assert len(contents(tmp_path / "whole")) > 4
    words = ["--source", "warc", "--input", str(tmp_path / "a.warc.gz"), "--workers", "1"]
    words += ["--output-dir", str(tmp_path / "joined"), "--world-size", "3"]
    for share in (["--rank", "1"], ["--rank", "0"], ["--rank", "2"], []):
        assert stage_main("collect", CollectConfig, "stages.collect.run", argv=words + share) == 0
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")
