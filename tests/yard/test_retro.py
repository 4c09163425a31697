"""Raw text to a Retro that reads its neighbours by one recipe; nothing to do the second time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.yard.yard import HEADLINE, ROOT, Ended, Yard
from trainyard.artifacts.manifest import read_manifest

pytestmark = [pytest.mark.yard, pytest.mark.timeout(900)]

MODEL = """
num_layers = 2
hidden_size = 32
num_attention_heads = 2
micro_batch_size = 4
global_batch_size = 4
lr = 1e-3
split = "80,20,0"
eval_iters = 1
num_threads = 1
"""
RECIPE = f"""
[collect]
max_size_mb = 0.3
num_shards = 1
[train_tokenizer]
vocab_size = 400
[tokenize]
append_eod = true
[bert_tokenizer]
vocab_size = 300
[bert_tokenize]
lang = "none"
[bert]
seq_length = 64
max_position_embeddings = 64
train_iters = 2
{MODEL}
[retro_db]
retro_index_ntrain = 200
retro_gpt_split = "80,20,0"
[retro_embed]
retro_bert_max_chunk_length = 64
[faiss_query]
retro_query_num_neighbors_query = 20
retro_query_num_neighbors_save = 2
[pretrain]
seq_length = 128
train_iters = 4
eval_at_start = true
retro_cross_attention_layers = [2]
{MODEL}"""


KILLS = {
    "flows.build_retro": [("embed-train", "runs"), ("faiss_add", "done"), ("query-train", "runs")],
    "flows.pretrain_retro": [("plan", "done"), ("pretrain", "runs")],
}
"""Lines of the flows' logs after which they get SIGKILL: within stages and between two."""


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str], module_cache: str
) -> tuple[Yard, Ended]:
    """A yard in which build-retro ran undisturbed."""
    yard = Yard(tmp_path_factory.mktemp("whole"), {**prefect_api, "TRAINYARD_CACHE": module_cache})
    return yard, yard.run("-m", "flows.build_retro", yard.recipe(RECIPE))


def test_a_retro_from_nothing_and_again(whole: tuple[Yard, Ended]) -> None:
    yard, built = whole
    recipe = yard.recipe(RECIPE)
    assert built.status == 0, built.err
    assert set(built.states().values()) == {"done"}
    assert Path(built.out.strip()) == yard.tiny / "retro"

    trained = yard.run("-m", "flows.pretrain_retro", recipe)
    assert trained.status == 0, trained.err
    done = {job for job, state in trained.states().items() if state == "done"}
    assert done == {"plan", "pretrain", "report"}
    assert "validation loss: from " in trained.err
    database = json.loads((yard.tiny / "retro/db/manifest.json").read_text())["output_digest"]
    checkpoint = next(yard.tiny.glob("checkpoint/iter_*/config.json")).read_text()
    assert database in checkpoint

    again = yard.run("-m", "flows.pretrain_retro", recipe)
    assert set(again.states().values()) == {"reused"}, again.err


def kill_at(yard: Yard, flow: str, job: str, state: str) -> None:
    """Run a flow until a job is in a state, then SIGKILL."""
    with yard.start("-m", flow, yard.recipe(RECIPE)) as process:
        assert process.stderr is not None
        found = (HEADLINE.match(line) for line in process.stderr)
        seen = any(one is not None and one.group(1, 2) == (job, state) for one in found)
        process.kill()
    assert seen, f"{flow} ended and {job} was never {state}"


def digests(yard: Yard) -> dict[str, str]:
    """Of every output, but for the plan and the card, which name the yard."""
    found = {path: read_manifest(str(path)) for path in yard.tiny.rglob("manifest.json")}
    return {
        str(path.relative_to(yard.tiny)): one[0].output_digest
        for path, one in found.items()
        if one is not None and one[0].stage not in ("plan", "report")
    }


def test_flows_that_are_killed_anywhere_end_as_the_undisturbed_one(
    tmp_path: Path, whole: tuple[Yard, Ended]
) -> None:
    undisturbed, _ = whole
    done = undisturbed.run("-m", "flows.pretrain_retro", undisturbed.recipe(RECIPE))
    assert done.status == 0, done.err
    yard = Yard(tmp_path, undisturbed.environment)
    for flow, kills in KILLS.items():
        for job, state in kills:
            kill_at(yard, flow, job, state)
        done = yard.run("-m", flow, yard.recipe(RECIPE))
        assert done.status == 0, done.err
    assert digests(yard) == digests(undisturbed)
    assert not list(yard.folder.rglob("*.claim.json"))


@pytest.mark.full
def test_the_quick_start_takes_less_than_eight_minutes(
    tmp_path: Path, prefect_api: dict[str, str]
) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": str(tmp_path / "cache")})
    done = yard.run("-m", "flows.pretrain_retro", str(ROOT / "recipes/retro_quickstart.toml"))
    assert done.status == 0, done.err
    assert set(done.states().values()) == {"done"}
    assert "validation loss: from " in done.err
    print(f"{done.seconds:.0f} s")
    assert done.seconds < 480
