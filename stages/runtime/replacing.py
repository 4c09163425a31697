"""Progress of writing a folder that somebody else's program takes for whole by a file in it: until
the last file is there, nothing in it may say so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.progress import Progress


class Replacing:
    """What plans the files tells when it is done with planning, and then of the bytes."""

    def __init__(self, stage: StageRun, complete: Sequence[str], stack: ExitStack) -> None:
        self._stage, self._complete, self._stack = stage, complete, stack
        self._progress: Progress | None = None

    def expect(self, total: int) -> None:
        """So many bytes are to come, and nothing was written yet."""
        self._stage.begin_replacing()
        for url in self._complete:
            store.delete(url)
        bar = self._stage.progress(total, "bytes", "convert")
        self._progress = self._stack.enter_context(bar)

    def advance(self, size: int) -> None:
        """So many of them are done."""
        assert self._progress is not None
        self._progress.update(size)


@contextmanager
def replacing(stage: StageRun, folder_url: str, complete: Sequence[str]) -> Iterator[Replacing]:
    """complete: names of files in the folder that say that what is beside them is whole; they are
    removed before the first file is written."""
    with ExitStack() as stack:
        yield Replacing(stage, [join(folder_url, name) for name in complete], stack)
