"""Fetches the pages of URL lists into WARC files, batch by batch; a kill costs a batch.

A batch of the list becomes pages-N.warc.gz and dropped-N.jsonl. A run over the dropped ones tries
them again."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.collect.config import CollectConfig
from stages.runtime.context import StageRun
from stages.runtime.document_units import (
    DROPPED,
    UnitDone,
    UnitJob,
    jobs_of,
    run_units,
)
from stages.runtime.unit_files import UnitFiles
from trainyard.artifacts import store
from trainyard.artifacts.inputs import check_all_listed
from trainyard.artifacts.store import FileRecord
from trainyard.artifacts.urls import has_credentials, show_url
from trainyard.collection.documents import Place, dropped
from trainyard.collection.fetch import client, url_rules
from trainyard.collection.fetch.client import Answer, Fetcher, Hosts, Outcome
from trainyard.collection.fetch.pages import PageWriter
from trainyard.collection.fetch.url_list import ListedUrl, listed_urls
from trainyard.collection.sources.files import SourceSplitter, source_files
from trainyard.collection.tally import Tally
from trainyard.corpus import units
from trainyard.corpus.formats.records import ORIGIN, ByteRange

BATCH_BYTES = 16 << 10
"""Of the list: some hundred URLs."""

RULES = (url_rules.DOMAIN, url_rules.SUFFIX, url_rules.SHORT, url_rules.MALFORMED)
REASONS = (*RULES, url_rules.DUPLICATE, *client.REASONS)


def fetch_pages(config: CollectConfig, stage: StageRun) -> list[dict[str, Any]]:
    """The tallies of all batches."""
    files = source_files(config.source, config.input, stage.inputs["input"].files)
    batches = units.plan_units(units.look_at(files), SourceSplitter(config.source, {}), BATCH_BYTES)
    check_all_listed(files)
    jobs = jobs_of(stage, config, files, batches)
    batch = _Batches(config, jobs)
    return run_units(stage, jobs, batch.fetch, 1, "fetch", names_of)


def names_of(job: UnitJob) -> tuple[str, str]:
    """The files of a batch."""
    return f"pages-{job.number:05d}.warc.gz", job.name(DROPPED)


def _listed(job: UnitJob) -> list[ListedUrl]:
    sources: Sequence[ByteRange] = job.unit.sources
    return [one for source in sources for one in listed_urls(source, job.names[source.url])]


def _key(url: str) -> bytes:
    return hashlib.blake2b(url.encode("utf-8", "replace"), digest_size=8).digest()


class _Batches:
    """What batches share: the hosts, and where URLs that are listed twice stand first."""

    def __init__(self, config: CollectConfig, jobs: Sequence[UnitJob]) -> None:
        self._config, self._hosts = config, Hosts()
        counts: Counter[bytes] = Counter(_key(one.url) for job in jobs for one in _listed(job))
        repeated = {key for key, count in counts.items() if count > 1}
        self._first: dict[bytes, Place] = {}
        for one in (one for job in jobs for one in _listed(job)) if repeated else ():
            if (key := _key(one.url)) in repeated:
                self._first.setdefault(key, one.place)

    def fetch(self, job: UnitJob) -> UnitDone:
        """Fetch a batch; answers wait in files of the scratch folder, as their order is the
        list's."""
        listed = _listed(job)
        tally = Tally.of(REASONS)
        found: dict[str, Outcome] = {}
        folder = Path(job.scratch) / f"batch-{job.number}"
        folder.mkdir()
        left_out = [self._why_not(one) for one in listed]
        urls = [one.url for one, why in zip(listed, left_out, strict=True) if why is None]
        numbers = {url: str(number) for number, url in enumerate(urls)}

        def done(outcome: Outcome) -> None:
            if outcome.answer is not None:
                (folder / numbers[outcome.url]).write_bytes(outcome.answer.body)
                outcome.answer = outcome.answer._replace(body=b"")
            found[outcome.url] = outcome

        fetcher = Fetcher(self._config.fetch, self._config.max_document_bytes, self._hosts)
        asyncio.run(fetcher.fetch_all(urls, done))
        records: list[FileRecord] = []
        with UnitFiles(job) as files:
            kept: list[tuple[str, Answer]] = []
            for one, why in zip(listed, left_out, strict=True):
                outcome = Outcome(one.url, None, *why) if why else found[one.url]
                tally.documents += 1
                if outcome.answer is not None:
                    tally.kept += 1
                    kept.append((one.url, outcome.answer))
                else:
                    files.write(DROPPED, self._count_dropped(tally, one, outcome))
            if kept:
                records.append(_write_pages(job, kept, folder, numbers))
        return UnitDone((*records, *files.records), tally.document())

    def _why_not(self, listed: ListedUrl) -> tuple[str, str] | None:
        if self._config.fetch.url_preset == "openwebtext" and (
            why := url_rules.why_not(listed.url)
        ):
            return why
        first = self._first.get(_key(listed.url), listed.place)
        if first != listed.place:
            return url_rules.DUPLICATE, f"listed in {first.file} at byte {first.offset}"
        return None

    def _count_dropped(self, tally: Tally, listed: ListedUrl, outcome: Outcome) -> dict[str, Any]:
        # One with a password is never fetched; its place in the list is known.
        url = show_url(listed.url) if has_credentials(listed.url) else listed.url
        reason = tally.reasons[outcome.reason]
        reason.dropped += 1
        reason.sample(self._config.num_samples, listed.place, outcome.why, url)
        fields = {"url": url, ORIGIN: listed.place.document()}
        if outcome.attempts:
            return dropped(fields, outcome.reason, outcome.why, attempts=outcome.attempts)
        return dropped(fields, outcome.reason, outcome.why)


def _write_pages(
    job: UnitJob, kept: Sequence[tuple[str, Answer]], folder: Path, numbers: dict[str, str]
) -> FileRecord:
    name = names_of(job)[0]
    with store.open_output(store.join(job.folder, name), name) as file:
        writer = PageWriter(file)
        for url, answer in kept:
            body = folder / numbers[url]
            writer.write(url, answer._replace(body=body.read_bytes()))
            body.unlink()
    return file.record
