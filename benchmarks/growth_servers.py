"""The work of the rows of `benchmarks.growth` that need a server: requests to an object store, and
flows with Prefect's server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.growth_cases import cpu_seconds
from tests.dev_store import dev_store

ROOT = Path(__file__).resolve().parents[1]

FLOW = """
import atexit, resource, runpy, sys

def tell() -> None:
    jobs = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(jobs.ru_utime + jobs.ru_stime)

atexit.register(tell)
runpy.run_module("flows.prepare_corpus", run_name="__main__")
"""


def prepare_corpus(count: int, scratch: Path) -> Callable[[], float]:
    """Processor seconds of the flow and of Prefect's server, their start included, for a recipe of
    so many small files; what the jobs take is left out."""
    from flows.server.ephemeral import EphemeralServer

    folder = scratch / f"flow-{count}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "texts").mkdir(parents=True)
    for number in range(count):
        (folder / f"texts/{number:05d}.jsonl").write_text(json.dumps({"text": str(number)}) + "\n")
    recipe = folder / "small.toml"
    recipe.write_text(
        f'corpus = ["{folder}/texts/*.jsonl"]\nevaluation_data = "{folder}/texts/00000.jsonl"\n'
        '[tokenize]\ntokenizer_type = "NullTokenizer"\nvocab_size = 100000\nworkers = 1\n'
    )
    words = [str(recipe), "--root", str(folder / "yard")]

    def run() -> float:
        began = cpu_seconds()
        server = EphemeralServer(folder / "prefect")
        try:
            server.wait()
            done = subprocess.run(
                [sys.executable, "-c", FLOW, *words],
                cwd=ROOT,
                env={**os.environ, **server.environment, "PYTHONPATH": str(ROOT)},
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
        finally:
            server.stop()
        return cpu_seconds() - began - float(done.stdout.splitlines()[-1])

    return run


@contextmanager
def _object_store() -> Iterator[str]:
    """An empty bucket of the store for development, which the environment names."""
    from botocore.session import Session

    with dev_store() as endpoint:
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "testaccess",
            "AWS_SECRET_ACCESS_KEY": "testsecret12345",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        Session().create_client("s3").create_bucket(Bucket="growth")
        yield "s3://growth"


def merge_requests(count: int, scratch: Path) -> Callable[[], int]:
    """Requests to an object store until a merge of so many pairs knows its inputs: their manifests
    and indices."""
    from tests.trainyard.corpus.token_files import write_tokens
    from trainyard.artifacts import store
    from trainyard.artifacts.backends.s3 import S3Backend
    from trainyard.artifacts.inputs import Manifests, resolve
    from trainyard.artifacts.lines import file_record
    from trainyard.artifacts.manifest import Manifest, publish
    from trainyard.corpus.merge import survey

    local = write_tokens(scratch / "pair", [[[1, 2]]])
    call, asked = S3Backend.call, 0

    def counted(self: S3Backend, method: str, **arguments: object) -> object:
        nonlocal asked
        asked += 1
        return call(self, method, **arguments)

    def run() -> int:
        nonlocal asked
        with _object_store() as bucket:
            pairs = [f"{bucket}/p{number:05d}" for number in range(count)]
            for pair in pairs:
                for end in (".bin", ".idx"):
                    store.write_bytes(pair + end, Path(f"{local}{end}").read_bytes())
                files = tuple(file_record(pair + end, end) for end in (".bin", ".idx"))
                publish(f"{pair}.manifest.json", Manifest(stage="tokenize", files=files), None)
            S3Backend.call, asked = counted, 0  # type: ignore[method-assign]
            manifests = Manifests()
            resolve("input", pairs, manifests)
            survey(pairs, scratch / f"survey-{count}", manifests=manifests)
            S3Backend.call = call  # type: ignore[method-assign]
        return asked

    return run
