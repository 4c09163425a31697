"""Options of `python -m stages.merge`, by Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from trainyard.artifacts.folder_in_shares import PrefixInShares
from trainyard.artifacts.output import Output, is_housekeeping
from trainyard.artifacts.urls import has_glob, lies_in, parent
from trainyard.config import MAX_RANKS, check_at_least, check_at_most, execution, location
from trainyard.corpus.pairs import BESIDE, stem
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig(PrefixInShares):
    """Merge .bin/.idx pairs into one pair, in the order of --input, and by name within a folder."""

    input: tuple[str, ...] = location()
    """Folders or URLs with pairs, prefixes of pairs, files of pairs, or patterns of these. The
    prefix of a virtual dataset stands for its parts."""
    output_prefix: str = location()
    """PREFIX of the .bin and .idx to write; not inside an input folder."""
    virtual: bool = False
    """Copy nothing: write only PREFIX.parts, a list of the pairs. Every --data-path accepts PREFIX,
    as long as the pairs stay where they are."""
    multimodal: bool = False
    """Merge multimodal pairs, whose indices have modes."""
    drop_provenance: bool = False
    """Merge without .docs sidecars, for pairs of which only some have one."""
    rank: int | None = execution(None)
    """With --world-size: copy only this share of the bytes, from 0. Shares may run at the same
    time, on different machines that all see --output-prefix."""
    world_size: int | None = execution(None)
    """Number of shares. Without --rank: join all finished shares; the result equals that of one
    run."""

    def __post_init__(self) -> None:
        if not self.entries():
            raise ConfigError("--input names no pair")
        for entry in self.entries():
            self._refuse_own_output(entry)
        check_at_least(self, 1, "world_size")
        check_at_most(self, MAX_RANKS, "world_size")
        self.check_rank()
        if self.virtual and self.world_size is not None:
            raise ConfigError(
                "--virtual copies nothing, so there is nothing to divide; leave --world-size out"
            )

    def _refuse_own_output(self, entry: str) -> None:
        if has_glob(entry):
            is_within = fnmatchcase(self.output_prefix, entry)
        else:
            folder = parent(self.output_prefix)
            is_within = self.output_prefix == entry or (
                lies_in(folder, entry) and lies_in(entry, folder)
            )
        if is_within:
            raise ConfigError(
                f"--output-prefix {self.output_prefix} is in the --input ({entry}), so a second "
                "run would merge its own output; choose a place outside it"
            )

    def entries(self) -> list[str]:
        """Folders, prefixes and patterns of prefixes, each once, in the order given.

        If the shell expands a pattern, it gives both files of a pair, and other files next to
        them."""
        names = [n for n in self.input if not is_housekeeping(n) and not n.endswith(BESIDE)]
        return list(dict.fromkeys(stem(name) for name in names))

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Every folder and every pair; a pattern as all files of the pairs that it means."""
        return {"input": tuple(_all_files(entry) for entry in self.entries())}

    def output(self) -> Output | None:
        """The prefix of the output, or of a share."""
        return self.own_prefix()

    def can_be_shared(self) -> bool:
        """Whether there is something to copy."""
        return not self.virtual

    def digested_inputs(self) -> tuple[str, ...]:
        """Shares digest the ranges of the .bin files that they read."""
        return ("input",)

    def names_inputs(self) -> bool:
        """Only a virtual dataset names the pairs."""
        return self.virtual


def _all_files(entry: str) -> str:
    # One pattern for .bin, .idx and .docs: patterns that match nothing are errors.
    return entry + ".[bid][ido][nxc]*" if has_glob(entry) else entry
