"""The merge stage: a folder of pairs to one pair."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.merge.config import MergeConfig
from stages.merge.run import run
from tests.stages.directly import run_directly
from trainyard.artifacts import store
from trainyard.corpus.indexed import IndexedDataset, IndexedWriter
from trainyard.errors import ArtifactError, ConfigError

FIRST: Any = [[[1, 2, 3]], [], [[4], [5]]]
SECOND: Any = [[[6, 7]]]


def put(prefix: str, docs: Any) -> None:
    with store.open_output(prefix + ".bin") as bin_file, store.open_output(prefix + ".idx") as idx:
        writer = IndexedWriter(bin_file, "uint16")
        for doc in docs:
            writer.add_document(doc)
        writer.write_index(idx)


def tokens(prefix: str) -> Any:
    return [[s.tolist() for s in doc] for doc in IndexedDataset(prefix).documents()]


def test_pairs_become_one_in_the_order_of_their_names(store_url: str) -> None:
    put(store.join(store_url, "parts/b"), SECOND)
    put(store.join(store_url, "parts/a"), FIRST)
    store.write_bytes(store.join(store_url, "parts/a.claim.json"), b"{}")
    prefix = store.join(store_url, "whole")
    metrics = run_directly(
        MergeConfig, run, input=store.join(store_url, "parts"), output_prefix=prefix
    )
    assert tokens(prefix) == FIRST + SECOND
    assert metrics == {"pairs": 2, "documents": 4, "sequences": 4, "tokens": 7}


def test_nothing_is_written_when_a_pair_is_broken(tmp_path: Path) -> None:
    put(str(tmp_path / "parts/a"), FIRST)
    put(str(tmp_path / "parts/b"), SECOND)
    Path(tmp_path / "parts/b.bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"b\.bin is 0 bytes, but .*b\.idx tells of 4"):
        run_directly(
            MergeConfig, run, input=str(tmp_path / "parts"), output_prefix=str(tmp_path / "out/p")
        )
    assert not (tmp_path / "out").exists()


def test_an_output_among_the_inputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="--output-prefix d/whole lies in the --input folder"):
        MergeConfig(input="d/", output_prefix="d/whole")
    with pytest.raises(ConfigError, match="not a pattern"):
        MergeConfig(input="d/*", output_prefix="e/whole")


def test_the_command(tmp_path: Path) -> None:
    put(str(tmp_path / "parts/a"), FIRST)
    base = [sys.executable, "-m", "stages.merge", "--input", str(tmp_path / "parts")]
    command = [*base, "--output-prefix", str(tmp_path / "whole")]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stderr
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["parts", "whole.bin", "whole.idx", "whole.manifest.json"]
