"""The object store of tests: of several that create an object at once one comes first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deploy.dev import store

WRITERS = 8


def looks_and_then_writes(there: set[str]) -> store.Application:
    """An application that creates an object once, in two steps, as moto does."""

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = str(environ["PATH_INFO"])
        if path in there:
            return [b"412"]
        time.sleep(0.1)  # all writers look before the first one writes
        there.add(path)
        return [b"200"]

    return answer


def race(application: store.Application) -> list[bytes]:
    """The answers to several writers that create the same object at once."""
    barrier = threading.Barrier(WRITERS)

    def write(_number: int) -> bytes:
        barrier.wait()
        return b"".join(application({"REQUEST_METHOD": "PUT", "PATH_INFO": "/a"}, print))

    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(write, range(WRITERS)))


def test_one_of_a_race_comes_first() -> None:
    assert race(looks_and_then_writes(set())).count(b"200") > 1
    answers = race(store.one_after_another(looks_and_then_writes(set())))
    assert sorted(answers) == [b"200"] + [b"412"] * (WRITERS - 1)


def test_readers_do_not_wait() -> None:
    is_writing, may_end = threading.Event(), threading.Event()

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] == "PUT":
            is_writing.set()
            may_end.wait(10)
        return [b"200"]

    served = store.one_after_another(application)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(served, {"REQUEST_METHOD": "PUT"}, print)
        assert is_writing.wait(10)
        assert served({"REQUEST_METHOD": "GET"}, print) == [b"200"]
        assert not writing.done()
        may_end.set()
        assert writing.result(10) == [b"200"]
