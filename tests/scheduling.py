"""Which process of `pytest -n 2 --dist loadfile` runs which file.

Neighbours import the same libraries and start the same servers. So one process takes files from the
front of the list, the other from its end, until they meet. At the end are those that use the pool
of ranks, which takes seconds to start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

BACK = "ranks"
"""The fixture that takes seconds to start."""


class FromBothEnds(LoadFileScheduling):
    """Every second process takes files from the end."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        # After each test, xdist counts what is left of all files that the process has had.
        files = self.assigned_work[node].items()
        self.assigned_work[node] = {name: file for name, file in files if not all(file.values())}
        if self.nodes.index(node) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FromBothEnds | None:
    """The scheduler of `loadfile`."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # xdist's own order is by the number of tests
    return FromBothEnds(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order of files, the same in every process of xdist."""
    if not hasattr(config, "workerinput"):
        return
    last = {item.path for item in items if BACK in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path in last)
