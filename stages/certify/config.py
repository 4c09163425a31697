"""Options of `python -m stages.certify`."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainyard.artifacts.output import Output
from trainyard.config import ALSO, ROLE, execution, location
from trainyard.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyConfig:
    """Prove that a training run lost and repeated no sample over all its attempts and layouts, or
    name the first broken link: python -m stages.certify RUN. Exit status 0: proven; 1: a link is
    broken."""

    run: str = location()
    """Run folder, finished or not."""
    data_path: tuple[str, ...] = location(())
    """Token files of the run, as --data-path of the run. Needed for an unfinished run, and if the
    files were moved; without them the samples are not checked."""
    train_data_path: tuple[str, ...] = location(())
    """The same for a run with --train-data-path."""
    data_cache_path: str | None = location(None)
    """Folder or URL of cached sample indices, as for the run; it is only read."""
    load: str | None = location(None)
    """Checkpoint of another run that this run resumed from, if any. Needed for an unfinished run,
    and if the checkpoint was moved."""
    check_data: bool = execution(True)
    """Compare the digests of the token files with those of the run's inputs."""
    check_digests: bool = execution(False)
    """Read every file and compare its digest, not only its size."""
    check_every: int = execution(1)
    """Check the samples and random draws of every N-th step only; everything else is checked at
    every step."""
    complete: bool = execution(False)
    """Fail if anything could not be checked, such as samples without their data."""
    output_file: str | None = field(default=None, metadata={ROLE: "location", ALSO: ("output",)})
    """File for the certificate, a JSON document; --output is the same option."""
    json: bool = execution(False)
    """Print the JSON document instead of the table."""

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        if self.check_every < 1:
            raise ConfigError(f"--check-every must be at least 1, got {self.check_every}")
        if self.data_path and self.train_data_path:
            raise ConfigError("--data-path and --train-data-path: give the one that the run used")

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """None: certify writes no artifact."""
        return {}

    def output(self) -> Output | None:
        """None: a certificate is a plain file."""
        return None
