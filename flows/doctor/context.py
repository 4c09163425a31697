"""The state that all checks of a yard share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from flows.yard.profile import Profile, StageEnvironment
from trainyard.artifacts.urls import is_local, join
from trainyard.machine import Machine, inspect_machine

FOLDER = ".doctor"
"""Folder in the root for files that checks write and remove."""


@dataclass
class YardContext:
    """A yard under examination."""

    profile: Profile
    root: str
    """Folder or URL of all output."""
    submits: bool = False
    """Whether to submit a job to the scheduler, which delays the jobs of others."""
    there: Machine | None = field(default=None, init=False)
    """The machine of the stages, as the check of ranks found it; None if that did not run."""

    @cached_property
    def site(self) -> StageEnvironment:
        """Where stages run."""
        return self.profile.stage_environment(join(self.root, FOLDER))

    @cached_property
    def here(self) -> Machine:
        """This machine."""
        return inspect_machine()

    @property
    def runs_here(self) -> bool:
        """Whether stages are processes of this machine."""
        return self.site.backend == "process"

    @property
    def has_local_store(self) -> bool:
        """Whether the root is in a file system."""
        return is_local(self.root)

    @property
    def num_gpus(self) -> int:
        """The most GPUs that a stage requests on one node."""
        wanted = (self.site.resources, *self.site.resources_by_stage.values())
        return max(resources.gpus_per_node for resources in wanted)
