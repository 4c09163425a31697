"""Extracts the main text of web pages in a process of its own (html_program), which a hostile page
may crash or occupy: it is confined, and is replaced when it ends."""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
from functools import cache
from typing import NamedTuple

from trainyard.collection.sources.html_program import SIZE, SIZES
from trainyard.confinement import environment
from trainyard.errors import InfrastructureError

PROGRAM = f"{__package__}.html_program"
ALARMS = (signal.SIGPROF, signal.SIGALRM)


class Extracted(NamedTuple):
    """What was found in a page."""

    title: str = ""
    text: str = ""
    is_late: bool = False
    """It took too long."""
    error: str = ""
    """What happened instead; empty: nothing did."""


class HtmlReader:
    """Extracts texts, one page after another."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, page: bytes, charset: str) -> Extracted:
        """The title and the text of a page. charset: that of its header; empty if it names none."""
        process = self._process or self._start()
        answer = self._ask(process, page, charset.encode())
        if answer is None:
            return self._end(process)
        if "error" in answer:
            return Extracted(error=answer["error"])
        return Extracted(answer["title"], answer["text"])

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-s", "-P", "-B", "-m", PROGRAM, str(self._timeout_seconds)]
        self._process = subprocess.Popen(
            command,
            cwd="/",
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._ask(self._process, b"", b"") is None:
            status = self._process.wait()
            self._process = None
            raise InfrastructureError(
                f"the reader of HTML does not start (status {status}); "
                f"python -m {PROGRAM} 1 </dev/null says why"
            )
        return self._process

    @staticmethod
    def _ask(
        process: subprocess.Popen[bytes], page: bytes, charset: bytes
    ) -> dict[str, str] | None:
        """The answer to a page; None if the process ends over it."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(SIZES.pack(len(page), len(charset)) + charset)
            process.stdin.write(page)
            process.stdin.flush()
        except BrokenPipeError:
            return None
        size = process.stdout.read(SIZE.size)
        if len(size) < SIZE.size:
            return None
        data = process.stdout.read(SIZE.unpack(size)[0])
        answer: dict[str, str] = json.loads(data)
        return answer

    def _end(self, process: subprocess.Popen[bytes]) -> Extracted:
        """What the end of the process says about the page that it had."""
        self._process = None
        process.communicate()
        status = -process.returncode
        if status in ALARMS:
            return Extracted(is_late=True)
        return Extracted(error=f"the reader of HTML ended with status {process.returncode}")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@cache
def html_reader(timeout_seconds: float) -> HtmlReader:
    """The reader of this process, started when the first page comes."""
    reader = HtmlReader(timeout_seconds)
    atexit.register(reader.close)
    return reader
