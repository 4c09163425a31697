"""Names and messages of others, on terminals, in logs, in failure.json and on Prefect's pages."""

from __future__ import annotations

import io
import json
import logging
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from markdown_it import MarkdownIt

from flows.backends.outcome import Outcome, StageError, classify, read_failure
from flows.backends.spec import LaunchSpec
from flows.cli.run_flow import fail
from flows.doctor.check import Finding, State
from flows.doctor.command import print_finding
from flows.gc.report import lines as gc_lines
from flows.logs.console import JOB, Console, headline
from flows.logs.lines import parse_line
from flows.pages.charts import lineage_page, lineage_picture
from flows.pages.run_pages import failure_page, stage_table
from flows.pages.stage_pages import failed_rows, stage_rows, submitted
from flows.recipes.summary import Summary
from stages.report.card import render
from stages.runtime.failure import report_failure
from tests.stages.test_report import hostile_card
from trainyard.charts.markdown import code, code_block, escape
from trainyard.errors import ConfigError

STEERING = [
    "\x1b[2J\x1b[H",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x9b2J",
    "\x00\x07\x08\x7f",
    "abc\rdone",
    "\u202egnp.exe",
    "\u2066\u2069\u200f\u061c",
    "\u200b\u2060\ufeff",
    "\u2028\u2029\x85\x0b\x0c",
    "\U000e0041",
    "\ud800",
]
"""Terminal escapes, carriage returns, bidirectional marks, invisible characters."""


def on_console(text: str, **extra: Any) -> str:
    out = io.StringIO()
    console = Console(out, verbose=True)
    record = logging.LogRecord("x", logging.WARNING, "", 0, "%s", (text,), None)
    vars(record).update(extra)
    console.handle(record)
    return out.getvalue()


def as_headline(text: str) -> str:
    found: list[str] = []
    log: Any = SimpleNamespace(log=lambda _, form, line, **__: found.append(form % line))
    headline(log, "pretrain", "done", note=text)
    return found[0]


def in_failure(text: str, folder: Path) -> str:
    (folder / "failure.json").unlink(missing_ok=True)
    report_failure("merge", ConfigError(text), False)
    return str(json.loads((folder / "failure.json").read_text())["message"])


def of_another_stage(text: str, folder: Path) -> str:
    document = {"message": text, "class": text, "exit_status": 2}
    (folder / "failure.json").write_text(json.dumps(document))
    found = classify("merge", 1, read_failure(str(folder)))
    return found.message + found.error


def swept(text: str) -> Any:
    garbage = SimpleNamespace(kind="claim", url=text, size_bytes=1, why=text)
    plan = SimpleNamespace(
        garbage=[garbage], kept={text: text}, unseen=[text], root=text, size_bytes=1
    )
    return SimpleNamespace(plan=plan, left=[(garbage, text)], failed=[(garbage, text)], removed=[])


def summary(text: str) -> Summary:
    return Summary(
        job=text,
        stage="merge",
        reused=False,
        reason=text,
        seconds=1.0,
        output_digest=text,
        manifest_url=text,
        metrics={text: 1.0, "x": text},
        log=text,
    )


def outcome(text: str) -> Outcome:
    return classify("merge", 2, {"message": text, "class": text, "exit_status": 2})


def cells(rows: list[dict[str, str]]) -> str:
    return " ".join(cell for row in rows for cell in row.values())


SHOWN: dict[str, Callable[[str], str]] = {
    "the console's warnings": on_console,
    "the console's lines of a stage": lambda text: on_console(text, **{JOB: "merge"}),
    "the console's headlines": lambda text: on_console(text, headline="done"),
    "a headline in the log": as_headline,
    "a line of a stage in the log": lambda text: parse_line(text)[1],
    "gc": lambda text: " ".join(gc_lines(swept(text), False)),
    "a stage's page": lambda text: cells(stage_rows(summary(text), None)),
    "a failed stage's page": lambda text: cells(failed_rows("x", outcome(text), 1, text)),
    "the table of stages": lambda text: stage_table([summary(text)]),
    "why a flow failed": lambda text: failure_page(ConfigError(text)),
    "Markdown": lambda text: escape(text) + code(text),
    "a block of code": lambda text: code_block(text, "bash"),
}


@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_no_name_steers_a_terminal(show: Callable[[str], str]) -> None:
    for text in STEERING:
        shown = show(f"a{text}b")
        assert shown.replace("\n", "").isprintable(), ascii(text)
        shown.encode()


PAGES: dict[str, Callable[[str], str]] = {
    "the run card": lambda text: render(hostile_card(text)),
    "the lineage picture": lambda text: lineage_picture(hostile_card(text).lineage),
    "the lineage page": lambda text: lineage_page(hostile_card(text).lineage),
}


@pytest.mark.parametrize("show", PAGES.values(), ids=PAGES)
def test_no_name_steers_a_page(show: Callable[[str], str]) -> None:
    kept = set("\n\u200c\u200d")  # joiners
    shown = set(show(f"a{'b'.join(STEERING)}b")) - kept
    assert not {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


@pytest.mark.parametrize("text", STEERING)
def test_no_message_steers_a_terminal(
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRAINYARD_RUN_DIR", str(tmp_path))
    # pytest-xdist cannot send what pytest would capture: half a character.
    log = logging.getLogger("stages.merge")
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "handlers", [logging.NullHandler()])
    assert in_failure(text, tmp_path).replace("\n", "").isprintable()
    assert of_another_stage(text, tmp_path).replace("\n", "").isprintable()
    fail(ConfigError(text))
    fail(StageError(outcome(text), log=text))
    print_finding(
        Finding(
            name="x", state=State.FAIL, message=text, todo=text, see="", exit_status=1, seconds=0.0
        )
    )
    out, error = capsys.readouterr()
    assert (out + error).replace("\n", "").isprintable()


# --- Markdown -------------------------------------------------------------------------------------

MARKDOWN = [
    "[click](http://evil.example)",
    "![x](http://evil.example/x.png)",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<http://evil.example>",
    "http://evil.example and https://evil.example",
    "www.evil.example",
    "mail@evil.example",
    "`code` ``code`` ```",
    "```\n# not code\n```",
    "~~~\nnot code",
    "a | b | c",
    "a \\| b",
    "| \\` | `|` |",
    "*bold* **bold** _em_ __strong__",
    "[ref]: http://evil.example\n[ref]",
    "\n\n# heading\n\n- list\n",
    "&lt;b&gt; &amp; &#91;x&#93;(y)",
    "\\[x](http://evil.example)",
    "\\\\[x](http://evil.example)",
    "$x$ ~~gone~~",
    "`",
    "\\`",
    " ` ",
    "x\n| y | z |",
]

HARMLESS = {
    *("inline", "text", "softbreak", "code_inline", "paragraph_open", "paragraph_close", "fence"),
    *(f"{kind}_{end}" for kind in ("table", "thead", "tbody", "tr", "th", "td", "strong")
      for end in ("open", "close")),
}  # fmt: skip


def parsed(text: str) -> list[Any]:
    """Tokens of GitHub's dialect, those inside others too."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    return [one for token in tokens for one in (token, *(token.children or ()))]


@pytest.mark.parametrize("text", MARKDOWN)
def test_escaped_text_is_only_text(text: str) -> None:
    tokens = parsed(f"x {escape(text)}")
    assert {token.type for token in tokens} <= HARMLESS
    shown = "".join(token.content for token in tokens if token.type == "text")
    assert shown.split()[1:] == text.split()
    for link in ("http://", "https://", "www."):
        assert link not in escape(text)


@pytest.mark.parametrize("text", MARKDOWN)
def test_code_ends_where_the_text_does(text: str) -> None:
    (inline,) = [t for t in parsed(code(text)) if t.type == "code_inline"]
    assert inline.content.replace("\\|", "|").split() == text.split()
    assert {t.type for t in parsed(code(text))} <= HARMLESS
    (block,) = parsed(code_block(text, "bash"))
    assert (block.type, block.content) == ("fence", text.rstrip() + "\n")


@pytest.mark.parametrize("text", MARKDOWN)
def test_a_table_has_the_columns_that_it_has(text: str, tmp_path: Path) -> None:
    tokens = parsed(f"{failure_page(ConfigError(text))}\n\n{stage_table([summary(text)])}\n")
    kinds = [token.type for token in tokens]
    lists = {f"{kind}_{end}" for kind in ("bullet_list", "list_item") for end in ("open", "close")}
    assert set(kinds) <= HARMLESS | lists
    assert kinds.count("list_item_open") == 1
    assert (kinds.count("th_open"), kinds.count("td_open"), kinds.count("tr_open")) == (4, 4, 2)
    spec = LaunchSpec(name="x", command=("echo", text), run_directory=str(tmp_path))
    assert [token.type for token in parsed(submitted(spec))] == ["fence"]
