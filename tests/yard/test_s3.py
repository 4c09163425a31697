"""A yard in an object store: the same flow, with only logs and run folders on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.yard.yard import COLLECTED, ROOT, Yard
from trainyard.artifacts import store
from trainyard.artifacts.urls import join

pytestmark = [pytest.mark.yard, pytest.mark.full, pytest.mark.s3, pytest.mark.timeout(600)]


def test_yard_in_object_store(tmp_path: Path, s3_url: str, prefect_api: dict[str, str]) -> None:
    here = {"YARD": s3_url, "PYTHONPATH": str(ROOT)}
    yard = Yard(tmp_path, {**prefect_api, **here}, working_directory=tmp_path)
    first = yard.pretrain(yard.recipe(COLLECTED))
    assert first.status == 0, first.err
    assert set(first.states().values()) == {"done"}
    card = first.out.splitlines()[-1]
    assert card == join(s3_url, "tiny", "card.html")
    assert b"<html" in store.read_bytes(card)

    again = yard.pretrain(yard.recipe(COLLECTED))
    assert again.status == 0, again.err
    assert set(again.states().values()) == {"reused"}, again.notes()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.toml", "yard"]
    assert [path.name for path in (tmp_path / "yard" / "tiny").iterdir()] == [".runs"]
    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    kept = [path for path in (tmp_path / "yard").rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept if secret in path.read_bytes()]
