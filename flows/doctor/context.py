"""What the checks are told of a yard, and what they tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from flows.yard.profile import Profile, StageEnvironment
from trainyard.artifacts.urls import is_local, join
from trainyard.machine import Machine, look_around

FOLDER = ".doctor"
"""Below the root: what trials write, and remove."""


@dataclass
class YardContext:
    """A yard to be looked at."""

    profile: Profile
    root: str
    """Folder or URL of everything that is made."""
    submits: bool = False
    """May start a job of a scheduler, which others wait behind."""
    there: Machine | None = field(default=None, init=False)
    """The machine of the stages as ranks found it; None before they ran, or when they did not."""

    @cached_property
    def place(self) -> StageEnvironment:
        """Where stages run."""
        return self.profile.stage_environment(join(self.root, FOLDER))

    @cached_property
    def here(self) -> Machine:
        """This machine."""
        return look_around()

    @property
    def runs_here(self) -> bool:
        """True when stages share the limits of this process."""
        return self.place.block == "process"

    @property
    def has_local_store(self) -> bool:
        """True for a file system."""
        return is_local(self.root)

    @property
    def num_gpus(self) -> int:
        """GPUs that any stage asks for on one node."""
        wanted = (self.place.resources, *self.place.resources_by_stage.values())
        return max(resources.gpus_per_node for resources in wanted)
