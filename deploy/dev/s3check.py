"""Checks whether an object store can hold a yard: reachable, accessible, with conditional writes.

    python deploy/dev/s3check.py [--make-bucket] s3://BUCKET[/FOLDER]

Endpoint and credentials come from AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and the like. It tries what
stages need (`trainyard.artifacts.store_probe`) in a temporary folder. Exit status 0: fit; 1: two
runs could publish the same artifact, or something else that stages need fails; 2: a wrong setting;
3: the store is unreachable."""

from __future__ import annotations

import argparse
import sys

from trainyard.artifacts import store
from trainyard.artifacts.backends import s3_client
from trainyard.artifacts.backends.s3 import S3Backend
from trainyard.artifacts.store_probe import check_reachable, is_open_to_all, probe
from trainyard.errors import TrainyardError

SECONDS = 10.0
"""How long to wait for an answer."""


def make_bucket(url: str) -> None:
    """Creates the bucket unless it exists."""
    bucket = S3Backend("s3").address(url)["Bucket"]
    with store.operation("make", url):  # explains refused access
        try:
            s3_client.call("head_bucket", Bucket=bucket)
        except FileNotFoundError:
            s3_client.call("create_bucket", Bucket=bucket)
            print(f"made bucket {bucket}")


def check(url: str) -> bool:
    """Tries everything and prints the results; returns whether the store is fit."""
    trials = list(probe(url))
    for trial in trials:
        print(f"{'WRONG' if trial.fault else 'ok':<6}{trial.name:<26}{trial.fault}")
    if is_open_to_all(url, SECONDS):
        print(f"{'note':<6}{'strangers':<26}are let in: anybody who reaches the store may read it")
    fit = not any(trial.fault for trial in trials)
    print("fit for a yard" if fit else "not fit for a yard")
    return fit


def main() -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description="Whether an object store can hold a yard.")
    parser.add_argument("url", help="s3://BUCKET or a folder in it")
    parser.add_argument("--make-bucket", action="store_true", help="make it if it is not there")
    given = parser.parse_args()
    try:
        check_reachable(given.url, SECONDS)
        if given.make_bucket:
            make_bucket(given.url)
        return 0 if check(given.url) else 1
    except TrainyardError as error:
        print(f"s3check: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
