"""Options of fill-in-the-middle samples. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FimConfig:
    """Which texts are rearranged (arXiv:2207.14255), and the tokens that mark their parts."""

    fim_data: bool = False
    """Rearrange texts so that the model learns to fill in their middle."""
    fim_rate: float = 0.5
    """Share of the texts that are rearranged."""
    fim_spm_rate: float = 0.5
    """Share of those whose suffix comes first; in the others the prefix does."""
    fim_split_sample: str | None = None
    """A token that separates the files of a text; each file is then rearranged by itself."""
    fim_fragment_rate: float | None = None
    """With --fim-split-sample: share of the files to rearrange in a text that is rearranged."""
    fim_no_prefix: str | None = None
    """Do not rearrange a text, or file, that begins with this."""
    fim_prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """Token before the middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""
    fim_pad_token: str = "<fim_pad>"
    """Token that pads a sample that became shorter."""
    fim_eod_token: str | None = None
    """Token that ends a text. Unset: the tokenizer's end of a document."""

    def __post_init__(self) -> None:
        """Refuse shares outside 0 to 1, and a split without its rate."""
        for flag, share in (
            ("--fim-rate", self.fim_rate),
            ("--fim-spm-rate", self.fim_spm_rate),
            ("--fim-fragment-rate", self.fim_fragment_rate),
        ):
            if share is not None and not 0 <= share <= 1:
                raise ConfigError(f"{flag} must be from 0 to 1, got {share}")
        if (self.fim_split_sample is None) != (self.fim_fragment_rate is None):
            raise ConfigError(
                "--fim-split-sample and --fim-fragment-rate go together; give both, or neither"
            )
        if "" in (self.fim_split_sample, self.fim_no_prefix):
            raise ConfigError(
                "--fim-split-sample and --fim-no-prefix must not be empty; leave the option out"
            )
