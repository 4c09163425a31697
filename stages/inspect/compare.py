"""Two checkpoints, opened and compared. Needs torch, which a description does without."""

from __future__ import annotations

from collections.abc import Callable

from stages.inspect.config import InspectConfig
from stages.inspect.differences import Differences
from stages.runtime.context import StageRun
from trainyard.checkpoint.compare import compare_documents, compare_tensors
from trainyard.checkpoint.load import open_checkpoint


def differences(
    config: InspectConfig, diff: str, matches: Callable[[str], bool], stage: StageRun
) -> Differences:
    """What differs of the tensors that match and, where all are asked for, of documents."""
    verify = config.verify_checkpoint
    with (
        open_checkpoint(config.checkpoint, "--checkpoint", verify) as ours,
        open_checkpoint(diff, "--diff", verify) as theirs,
    ):
        ours.check()
        theirs.check()
        names = [name for name in ours.index if matches(name)]
        total = sum(ours.spec(name).size_bytes for name in names)
        with stage.progress(total, "bytes", "compare") as progress:
            tensors = tuple(compare_tensors(ours, theirs, matches, progress.update))
        keys = () if config.filter else tuple(compare_documents(ours, theirs))
        compared = len({name for side in (ours, theirs) for name in side.index if matches(name)})
        return Differences(ours.url, theirs.url, compared, tensors, keys)
