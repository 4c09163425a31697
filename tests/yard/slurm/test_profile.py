"""One recipe here and on two nodes of Slurm in shares makes the same tokens; only failed shares run
again."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.yard.slurm.cluster import ask
from tests.yard.yard import ROOT, Yard, write_corpus
from trainyard.artifacts.manifest import read_manifest

pytestmark = [pytest.mark.yard, pytest.mark.timeout(500), pytest.mark.usefixtures("cluster")]

RECIPE = """
corpus = ["{folder}/in/*.jsonl"]
evaluation_data = "{folder}/in/a.jsonl"

[tokenize]
tokenizer_type = "HuggingFaceTokenizer"
tokenizer_model = "{folder}/tokenizer"
append_eod = true
"""

PROFILE = """
block = "slurm"
python = "{folder}/python"
run_folder = "{folder}/runs"
shares_at_once = 2

[shares]
tokenize = 3
merge = 2

[resources]
cpus_per_node = 1

[slurm]
warning_seconds = 30
exclusive = true

[environment]
OMP_NUM_THREADS = "1"
PYTHONPATH = "{root}"
"""

FAILS_ONCE = """#!/bin/bash
# Share 1 meets a store that is away, once; share 0 keeps its node until then.
[[ " $* " == *" --rank "* ]] && echo "$2 $SLURMD_NODENAME" >>{folder}/hosts
if [[ " $* " == *" --rank 1 "* && ! -e {folder}/failed ]]; then
  touch {folder}/failed
  exit 3
fi
until [[ " $* " != *" --rank 0 "* || -e {folder}/failed ]]; do sleep 0.1; done
exec {python} "$@"
"""


def test_slurm_shares_make_the_same_tokens(tmp_path: Path, prefect_api: dict[str, str]) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    (tmp_path / "in").mkdir()
    write_corpus(tmp_path / "in" / "a.jsonl", 300, seed=1)
    source, target = str(tmp_path / "in"), str(tmp_path / "tokenizer")
    arguments = ("--input", source, "--output-dir", target, "--vocab-size", "300")
    assert yard.run("-m", "stages.train_tokenizer", *arguments).status == 0

    python = tmp_path / "python"
    python.write_text(FAILS_ONCE.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    profile = tmp_path / "cluster.toml"
    profile.write_text(PROFILE.format(folder=tmp_path, root=ROOT))
    recipe = yard.recipe(RECIPE.format(folder=tmp_path))

    there = ("--profile", str(profile), "--yard", str(tmp_path / "there"))
    slurm = yard.run("-m", "flows.prepare_corpus", recipe, *there)
    assert slurm.status == 0, slurm.err
    jobs = ask("squeue", "--noheader", "--states=all", "--format=%j %k").splitlines()
    tokenizing = [line for line in jobs if line.startswith("tokenize-a-shares-")]
    assert len(tokenizing) >= 2
    assert all(re.search(r" trainyard:tiny_\S+_[0-9a-f-]{36}$", line) for line in tokenizing)
    here = yard.run("-m", "flows.prepare_corpus", recipe, "--yard", str(tmp_path / "here"))
    assert here.status == 0, here.err
    digests = []
    for place in ("there", "here"):
        found = read_manifest(f"{tmp_path}/{place}/tiny/tokens/corpus_text_document.manifest.json")
        assert found is not None
        digests.append(found[0].output_digest)
    assert digests[0] == digests[1]
    hosts = [line.split() for line in (tmp_path / "hosts").read_text().splitlines()]
    assert {node for stage, node in hosts if stage == "stages.tokenize"} == {"node1", "node2"}
    assert [stage for stage, _ in hosts].count("stages.merge") == 2

    first, second = sorted((tmp_path / "runs" / "tiny" / "tokenize-a-shares").iterdir())
    assert "#SBATCH --array=0-2%2" in (first / "job.sbatch").read_text()
    assert "#SBATCH --array=1%2" in (second / "job.sbatch").read_text()
