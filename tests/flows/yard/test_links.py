"""Links of pages, which browsers follow if a web server is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.yard.links import BROWSE, browsed, how_to_open, link_to
from flows.yard.read_profile import parse_profile, read_profile
from trainyard.errors import ConfigError

SERVER = "http://127.0.0.1:4201"


def test_without_a_server_the_link_is_the_place(tmp_path: Path) -> None:
    assert link_to("s3://yard/card.html") == "s3://yard/card.html"
    assert link_to(str(tmp_path / "card.html")).startswith("file:///")
    assert f"set {BROWSE} to" in how_to_open("s3://yard/card.html")


@pytest.mark.parametrize(
    ("url", "shown", "link"),
    [
        ("s3://yard/a/card.html", f"s3://yard={SERVER}", f"{SERVER}/a/card.html"),
        ("s3://yard/a/card.html", f"s3://yard/={SERVER}/", f"{SERVER}/a/card.html"),
        ("s3://yard/a/card.html", "s3://yard/a=https://x.org/y=1", "https://x.org/y=1/card.html"),
        ("s3://yard/a b#?.html", f"s3://yard={SERVER}", f"{SERVER}/a%20b%23%3F.html"),
        ("s3://yard2/card.html", f"s3://yard={SERVER}", "s3://yard2/card.html"),
        ("/data/a=b/card.html", f"/data/a=b={SERVER}", f"{SERVER}/card.html"),
        ("file:///data/card.html", f"/data={SERVER}", f"{SERVER}/card.html"),
        ("/data/card.html", "/data=nonsense", "file:///data/card.html"),
        ("/data/card.html", f"={SERVER}", "file:///data/card.html"),
    ],
)
def test_what_lies_below_a_prefix_is_found_at_its_url(url: str, shown: str, link: str) -> None:
    assert link_to(url, shown) == link


def test_relative_root_is_below_the_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    link = link_to(str(tmp_path / "yard" / "tiny" / "card.html"), f"yard={SERVER}")
    assert link == f"{SERVER}/tiny/card.html"
    assert "`make ui`" in how_to_open(link)
    assert how_to_open("https://files.example.org/card.html") == ""


def test_the_environment_goes_over_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BROWSE, raising=False)
    assert browsed("yard", None) == ""
    assert browsed("yard", SERVER) == f"yard={SERVER}"
    monkeypatch.setenv(BROWSE, "s3://b=https://x.org")
    assert browsed("yard", SERVER) == "s3://b=https://x.org"


def test_the_profile_of_this_machine_leads_to_make_ui(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BROWSE_PORT", raising=False)
    assert read_profile().browse == SERVER
    monkeypatch.setenv("BROWSE_PORT", "5000")
    assert read_profile().browse == "http://127.0.0.1:5000"
    with pytest.raises(ConfigError, match=r"yard site: browse must begin with http.* got 'x'"):
        parse_profile({"browse": "x"}, "site")
