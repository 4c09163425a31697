"""The S3 store that a benchmark talks to: any, named by AWS_ENDPOINT_URL and the usual keys.

    AWS_ENDPOINT_URL=http://127.0.0.1:9000 AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... \\
        python -m benchmarks.corpus s3"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainyard.artifacts import store
from trainyard.artifacts.backends.s3 import S3Backend
from trainyard.errors import ConfigError

BUCKET = os.environ.get("TRAINYARD_BENCH_BUCKET", "yard-bench")
PIECE = 8 << 20
CONNECTIONS = 8


def bucket_url() -> str:
    """Where the benchmark writes."""
    return f"s3://{BUCKET}"


def upload(path: Path, name: str = "") -> str:
    """Put a file into the bucket, under its own name or another; its URL.

    In bounded memory: what this process once held counts, by the kernel's books, as the peak of
    every child."""
    _make_bucket()
    url = f"{bucket_url()}/{name or path.name}"
    with path.open("rb") as source, store.open_output(url) as out:
        shutil.copyfileobj(source, out, PIECE)
    return url


def _make_bucket() -> None:
    try:
        store.list_folder(bucket_url())
    except ConfigError:
        S3Backend("s3").call("create_bucket", Bucket=BUCKET)


def upload_folder(folder: Path, name: str) -> str:
    """Put the files below a folder into the bucket, in the place of what is there; its URL."""
    url = f"{bucket_url()}/{name}"
    _make_bucket()
    store.delete_tree(url)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        upload(path, f"{name}/{path.relative_to(folder).as_posix()}")
    return url


def read_seconds(url: str) -> float:
    """How long the store takes to give a whole object, over several connections at once."""
    size = store.info(url).size_bytes
    began = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(
            pool.map(
                lambda at: len(store.read_range(url, at, min(at + PIECE, size))),
                range(0, size, PIECE),
            )
        )
    return time.perf_counter() - began
