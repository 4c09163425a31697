"""Which process of `pytest -n 2 --dist loadfile` runs which file.

Neighbours import the same libraries and start the same servers. So one process takes files from the
front of the list, the other from its end, until they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController


class FromBothEnds(LoadFileScheduling):
    """Every second process takes files from the end."""

    def _assign_work_unit(self, node: WorkerController) -> None:
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
