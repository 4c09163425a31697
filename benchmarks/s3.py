"""The S3 store that a benchmark talks to: any, named by AWS_ENDPOINT_URL and the usual keys.

    AWS_ENDPOINT_URL=http://127.0.0.1:9000 AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... \\
        python -m benchmarks.corpus s3"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BUCKET = os.environ.get("TRAINYARD_BENCH_BUCKET", "yard-bench")
PIECE = 8 << 20
CONNECTIONS = 8


def bucket_url() -> str:
    """Where the benchmark writes."""
    return f"s3://{BUCKET}"


def _files() -> Any:
    import s3fs

    files = s3fs.S3FileSystem()
    if not files.exists(BUCKET):
        files.mkdir(BUCKET)
    return files


def upload(path: Path) -> str:
    """Put a file into the bucket; its URL."""
    url = f"{bucket_url()}/{path.name}"
    _files().put(str(path), url)
    return url


def read_seconds(url: str) -> float:
    """How long the store takes to give a whole object, over several connections at once."""
    files = _files()
    size = files.info(url)["size"]
    began = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(
            pool.map(
                lambda at: len(files.cat_file(url, start=at, end=at + PIECE)), range(0, size, PIECE)
            )
        )
    return time.perf_counter() - began
