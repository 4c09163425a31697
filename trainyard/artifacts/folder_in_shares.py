"""Options of a stage whose output several runs can make in shares: a folder, or a prefix."""

from __future__ import annotations

from trainyard.artifacts.output import Output
from trainyard.artifacts.urls import join
from trainyard.errors import ConfigError


class InShares:
    """What both have in common; options have these names: with --rank a share, without it the
    whole."""

    __slots__ = ()
    rank: int | None
    world_size: int | None

    def can_be_shared(self) -> bool:
        """Whether these options let several runs make the output."""
        return True

    def check_rank(self) -> None:
        """Raise ConfigError for a share that cannot be."""
        _check_rank(self.rank, self.world_size)


class FolderInShares(InShares):
    """A base of options whose output is a folder."""

    __slots__ = ()
    output_dir: str

    def own_folder(self) -> Output:
        """The whole output, or the share of this run."""
        return Output.directory(
            self.output_dir if self.rank is None else self.share_folder(self.rank)
        )

    def share_folder(self, rank: int) -> str:
        """The folder of one share."""
        return join(self.shares_url, f"{rank:05d}-of-{self.world_size:05d}")

    def all_shares(self) -> list[Output]:
        """The shares that are joined."""
        return [Output.directory(self.share_folder(rank)) for rank in range(self.world_size or 0)]

    def whole(self) -> Output | None:
        """For a share: the whole output."""
        return Output.directory(self.output_dir) if self.rank is not None else None

    def spent(self) -> tuple[str, ...]:
        """Intermediate outputs to remove: the shares, also those of an abandoned fan-out."""
        return (self.shares_url,) if self.rank is None else ()

    @property
    def shares_url(self) -> str:
        """The folder of all shares, removed when the whole output exists."""
        return f"{self.output_dir.rstrip('/')}.shares"


class PrefixInShares(InShares):
    """A base of options whose output is files with one prefix."""

    __slots__ = ()
    output_prefix: str

    def own_prefix(self) -> Output:
        """The whole output, or the share of this run."""
        return Output.prefix(
            self.output_prefix if self.rank is None else self.share_prefix(self.rank)
        )

    def share_prefix(self, rank: int) -> str:
        """The prefix of one share."""
        return join(self.shares_url, f"{rank:05d}-of-{self.world_size:05d}")

    def all_shares(self) -> list[Output]:
        """The shares that are joined."""
        return [Output.prefix(self.share_prefix(rank)) for rank in range(self.world_size or 0)]

    def whole(self) -> Output | None:
        """For a share: the whole output."""
        return Output.prefix(self.output_prefix) if self.rank is not None else None

    def spent(self) -> tuple[str, ...]:
        """Intermediate outputs to remove: the shares, also those of an abandoned fan-out."""
        return (self.shares_url,) if self.rank is None else ()

    @property
    def shares_url(self) -> str:
        """The folder of all shares, removed when the whole output exists."""
        return f"{self.output_prefix}.shares"


def _check_rank(rank: int | None, world_size: int | None) -> None:
    if rank is None:
        return
    if world_size is None:
        raise ConfigError(f"--rank {rank} needs --world-size, the number of shares")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"--rank {rank}: shares of --world-size {world_size} are 0 to {world_size - 1}"
        )
