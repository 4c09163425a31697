"""Non-persistent saves, under Megatron-LM's names. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainyard.config import execution, location
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class NonPersistentConfig:
    """Temporary steps to resume from, saved more often than --save-interval, to another folder."""

    non_persistent_save_interval: int | None = execution(None)
    """Steps between two saves to the folder of --non-persistent-ckpt-type. A step that is
    saved to --save is not saved there."""
    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = execution(None)
    """global: in one folder that all ranks share. local: on a disk or memory file system of each
    node. in_memory is refused."""
    non_persistent_global_ckpt_dir: str | None = location(None)
    """Folder or URL of global saves; unset: non_persistent/ in --save."""
    non_persistent_local_ckpt_dir: str | None = location(None)
    """Folder of local saves, on every node. Variables such as $TMPDIR are expanded on the node,
    unless the shell has expanded them."""
    non_persistent_keep_last: int = execution(1)
    """Number of non-persistent saves to keep; one more exists while a save is written."""
    non_persistent_upload: bool = execution(False)
    """Copy local saves to --save while training continues. A save is skipped if a newer one exists
    before its copy starts. A complete copy is a step of --save."""

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        interval, kind = self.non_persistent_save_interval, self.non_persistent_ckpt_type
        if kind == "in_memory":
            raise ConfigError(
                "--non-persistent-ckpt-type in_memory: such a copy would be lost with its process; "
                "give "
                "local, and a memory file system for "
                "--non-persistent-local-ckpt-dir, such as /dev/shm/NAME"
            )
        if interval is not None and interval < 1:
            raise ConfigError(f"--non-persistent-save-interval must be at least 1, got {interval}")
        if (interval is None) != (kind is None):
            given, other = "--non-persistent-save-interval", "--non-persistent-ckpt-type"
            given, other = (given, other) if kind is None else (other, given)
            raise ConfigError(f"{given} needs {other} as well: one says where, the other when")
        if (kind == "local") != (self.non_persistent_local_ckpt_dir is not None):
            raise ConfigError(
                "--non-persistent-ckpt-type local and --non-persistent-local-ckpt-dir go together: "
                "give both, or neither"
            )
        if self.non_persistent_global_ckpt_dir is not None and kind != "global":
            raise ConfigError(
                "--non-persistent-global-ckpt-dir needs --non-persistent-ckpt-type global"
            )
        if self.non_persistent_keep_last < 1:
            raise ConfigError(
                f"--non-persistent-keep-last must be at least 1, got "
                f"{self.non_persistent_keep_last}"
            )
        if self.non_persistent_upload and kind != "local":
            raise ConfigError("--non-persistent-upload needs --non-persistent-ckpt-type local")

    def folder(self, save: str) -> str | None:
        """Folder of these saves, with variables unexpanded; None without such saves."""
        if self.non_persistent_ckpt_type == "local":
            return self.non_persistent_local_ckpt_dir
        if self.non_persistent_ckpt_type == "global":
            return self.non_persistent_global_ckpt_dir or f"{save.rstrip('/')}/non_persistent"
        return None
