"""Prefect's page of the gate of a release: how far each engine is from the training's forward."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect.artifacts import acreate_table_artifact

from flows.pages.stage_pages import Row, has_pages, page_key, shown
from trainyard.artifacts.manifest import read_listed_json, read_manifest
from trainyard.artifacts.output import MANIFEST
from trainyard.artifacts.urls import join
from trainyard.logging import printable

FILE = "parity.json"


async def show_parity(folder: str) -> None:
    """Show the table that stage parity published in a folder."""
    if has_pages():
        await shown(_show(folder))


async def _show(folder: str) -> None:
    document = await asyncio.to_thread(read_parity, folder)
    if document is not None:
        await acreate_table_artifact(
            table=parity_rows(document),
            key=page_key("parity", "table"),
            description=f"Training beside serving, at most {document['tolerance']:g} nats apart",
        )


def read_parity(folder: str) -> dict[str, Any] | None:
    """The document of the stage; None if there is none."""
    found = read_manifest(join(folder, MANIFEST))
    record = None if found is None else found[0].record(FILE)
    document: dict[str, Any] | None = (
        None if record is None else read_listed_json(join(folder, FILE), record)
    )
    return document


def parity_rows(document: dict[str, Any]) -> list[Row]:
    """A row for each engine."""
    return [
        {
            "engine": printable(str(row["engine"])),
            "tokens": f"{row['num_prompt_tokens'] + row['num_new_tokens']:,}",
            "largest difference, nats": f"{row['max_difference']:.3g}",
            "mean": f"{row['mean_difference']:.3g}",
            "same likeliest token": f"{row['num_likeliest']:,} of {row['num_new_tokens']:,}",
        }
        for row in document["rows"]
    ]
