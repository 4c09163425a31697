"""Progress of writing a folder that other programs consider complete if a certain file exists.

The file must not exist until all others are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.artifacts.urls import join
from trainyard.progress import Progress


class Replacing:
    """Callbacks for a writer: the total once it has planned its files, then the bytes written."""

    def __init__(self, stage: StageRun, complete: Sequence[str], stack: ExitStack) -> None:
        self._stage, self._complete, self._stack = stage, complete, stack
        self._progress: Progress | None = None

    def expect(self, total: int) -> None:
        """Set the total bytes, before anything is written."""
        self._stage.begin_replacing()
        for url in self._complete:
            store.delete(url)
        bar = self._stage.progress(total, "bytes", "convert")
        self._progress = self._stack.enter_context(bar)

    def advance(self, size: int) -> None:
        """Report bytes written."""
        assert self._progress is not None
        self._progress.update(size)


@contextmanager
def replacing(stage: StageRun, folder_url: str, complete: Sequence[str]) -> Iterator[Replacing]:
    """complete: names of the files that mark the folder as complete; removed before the first file
    is written."""
    with ExitStack() as stack:
        yield Replacing(stage, [join(folder_url, name) for name in complete], stack)
