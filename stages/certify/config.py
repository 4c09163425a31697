"""Options of `python -m stages.certify`."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainyard.artifacts.output import Output
from trainyard.config import ALSO, ROLE, execution, location
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyConfig:
    """Prove that a training run lost and repeated no sample, over all its attempts and layouts, or
    name the first broken link: python -m stages.certify RUN. Exit status 0: proven; 1: a link is
    broken."""

    run: str = location()
    """Run folder, finished or not."""
    data_path: tuple[str, ...] = location(())
    """Where the token files of the run lie now, as --data-path of the run: of an unfinished run,
    which does not tell, or when they were moved. Without them the samples are not checked."""
    train_data_path: tuple[str, ...] = location(())
    """The same for a run that was given its training data apart."""
    data_cache_path: str | None = location(None)
    """Folder or URL where sample indices are found, as the run's; it is only read."""
    load: str | None = location(None)
    """Where the checkpoint lies now that the run went on from, if it went on from one: of an
    unfinished run, or when it was moved."""
    check_data: bool = execution(True)
    """Compare the digests of the token files with those that the run was made of."""
    check_digests: bool = execution(False)
    """Read every file and compare its digest, not its size alone."""
    check_every: int = execution(1)
    """Work out samples and random draws of every so many-th step alone; all else is checked at
    every step."""
    complete: bool = execution(False)
    """What could not be checked, such as samples without their data, is a failure too."""
    output_file: str | None = field(default=None, metadata={ROLE: "location", ALSO: ("output",)})
    """Write the certificate there, a JSON document; --output is the same."""
    json: bool = execution(False)
    """Print the JSON document in place of the table."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.check_every < 1:
            raise ConfigError(f"--check-every must be at least 1, got {self.check_every}")
        if self.data_path and self.train_data_path:
            raise ConfigError("--data-path and --train-data-path: give the one that the run was")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """None that count: what is certified is read here and now."""
        return {}

    def output(self) -> Output | None:
        """No artifact: a certificate is a document by the side."""
        return None
