"""Keys and shapes of Megatron core's sharded_state_dict of every family, kept in
tests/golden/megatron/torch_dist_keys.json, and how they were made:

    python -m tests.trainyard.conversion.torch_dist.frozen_keys

makes them anew, by releases from the package index."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.trainyard.conversion.megatron import megatron_package
from tests.trainyard.conversion.megatron.converted_runs import NUM_TOKENS
from tests.trainyard.conversion.torch_dist.families import FAMILIES, impl_of, written

GOLDEN = Path(__file__).parents[3] / "golden" / "megatron" / "torch_dist_keys.json"

PROGRAM = Path(__file__).parents[1] / "megatron" / "megatron_family_program.py"
"""Not imported: it is for a process of its own."""

RELEASE = "0.15.3"
RELEASES = {"hybrid-experts": "0.16.1"}
"""The first with layers of experts in hybrids."""


def release_of(kind: str) -> str:
    """The release whose keys are kept."""
    return RELEASES.get(kind, RELEASE)


def some_batch() -> dict[str, torch.Tensor]:
    """(2, 16) tokens and what else a family takes; the second row of a BERT or T5 is padded.
    Neighbours are of 4 chunks, 2 of 8 tokens each."""
    generator = torch.Generator().manual_seed(7)
    return {
        "tokens": torch.randint(0, NUM_TOKENS, (2, 16), generator=generator),
        "decoder_tokens": torch.randint(0, NUM_TOKENS, (2, 8), generator=generator),
        "types": (torch.arange(16) > 7).long().expand(2, -1).contiguous(),
        "neighbors": torch.randint(0, NUM_TOKENS, (2, 4, 2, 8), generator=generator),
        "mask": (torch.arange(16) < torch.tensor([[16], [9]])).long(),
    }


def run_megatron(version: str, kinds: Iterable[str], root: Path) -> None:
    """Let a release of Megatron core build, load and save these models, each in a folder below
    `root`."""
    for kind in kinds:
        (root / kind).mkdir(parents=True)
        written(root / kind, FAMILIES[kind](), transformer_impl=impl_of(kind))
        torch.save(some_batch(), root / kind / "batch.pt")
    megatron_package.run(version, PROGRAM, [str(root)])


def listed(folder: Path) -> dict[str, Any]:
    """What a release says of one model."""
    found: dict[str, Any] = json.loads((folder / "listed.json").read_text())
    return found


def main() -> None:
    """All of them."""
    kept: dict[str, Any] = {}
    for version in sorted({release_of(kind) for kind in FAMILIES}):
        kinds = [kind for kind in FAMILIES if release_of(kind) == version]
        with tempfile.TemporaryDirectory() as folder:
            run_megatron(version, kinds, Path(folder))
            kept |= {kind: listed(Path(folder) / kind) for kind in kinds}
    rows = [f"{json.dumps(kind)}: {json.dumps(kept[kind])}" for kind in sorted(kept)]
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
