"""Profiles of a training, which browse hands out as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flows.browse.test_browse import asking

PROFILES = ("profile-rank0000-steps-11-12.json.gz", "memory-history-rank0000.pickle")


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_downloaded_and_not_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    others = ("c4-train.00000-of-01024.json.gz", "model.pickle", f"my-{name}")
    for other in others:
        (tmp_path / other).write_bytes(b"1")
    with asking(str(tmp_path)) as ask:
        reply = ask(f"/{name}")
        assert (reply.kind, reply.body) == ("application/octet-stream", b"\x1f\x8b")
        assert reply.headers["Content-Disposition"] == "attachment"
        assert f'href="./{name}"' in ask("/").text
        assert {ask(f"/{other}").status for other in others} == {403}
