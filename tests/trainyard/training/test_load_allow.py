"""--load of weights that are not quite those of this model: refused, unless named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.training.resumed_runs import go
from trainyard.checkpoint.load import open_checkpoint
from trainyard.errors import ArtifactError, ConfigError
from trainyard.training.run.restore import Allowed

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "global_batch_size": 2,
    "train_iters": 1,
    "eval_iters": 0,
}
UNTIED = {"untie_embeddings_and_output_weights": True}
STILL = {"iterations_to_skip": [1], "finetune": True}
"""A step that changes no weight."""
OUTPUT = "model.output_layer.weight"
EMBEDDING = "model.embedding.word_embeddings.weight"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pair(tmp_path_factory.mktemp("tokens") / "t", [60] * 10)


def test_a_missing_weight_is_initialised_if_allowed_by_name(tokens: str, tmp_path: Path) -> None:
    tied, new = tmp_path / "tied", tmp_path / "new"
    go(tokens, tied, **SMALL)
    go(tokens, new, **SMALL, **UNTIED, iterations_to_skip=[1])  # as it is drawn
    options = {**SMALL, **UNTIED, **STILL, "load": str(tied)}
    with pytest.raises(
        ArtifactError, match=rf"1 missing:\s+{OUTPUT}\n  if .* --load-allow-missing PATTERN"
    ):
        go(tokens, tmp_path / "refused", **options)
    with pytest.raises(ArtifactError, match=r"1 missing"):
        go(tokens, tmp_path / "other", **options, load_allow_missing=["decoder.*"])
    go(tokens, tmp_path / "on", **options, load_allow_missing=["output_layer.*"])
    with (
        open_checkpoint(str(tied)) as theirs,
        open_checkpoint(str(new)) as drawn,
        open_checkpoint(str(tmp_path / "on")) as found,
    ):
        assert found.read(OUTPUT).equal(drawn.read(OUTPUT))
        for name in theirs.names("model."):
            assert found.read(name).equal(theirs.read(name)), name
        assert not found.read(EMBEDDING).equal(drawn.read(EMBEDDING))


def test_an_unexpected_weight_is_ignored_if_allowed_by_name(
    tokens: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go(tokens, tmp_path / "untied", **SMALL, **UNTIED)
    options = {**SMALL, **STILL, "load": str(tmp_path / "untied")}
    with pytest.raises(
        ArtifactError, match=rf"1 unexpected:\s+{OUTPUT}\n .* --load-allow-unexpected PATTERN"
    ):
        go(tokens, tmp_path / "refused", **options, load_allow_missing=["*"])
    go(tokens, tmp_path / "on", **options, load_allow_unexpected=["model.output_layer.weight"])
    assert "--load-allow-unexpected: not loaded: 1 weights" in caplog.text
    assert OUTPUT in caplog.text
    with open_checkpoint(str(tmp_path / "on")) as found:
        assert OUTPUT not in found.index


def test_shapes_are_never_allowed_to_differ(tokens: str, tmp_path: Path) -> None:
    go(tokens, tmp_path / "one", **SMALL)
    options = {**SMALL, **STILL, "load": str(tmp_path / "one"), "ffn_hidden_size": 32}
    anything = {"load_allow_missing": ["*"], "load_allow_unexpected": ["*"]}
    with pytest.raises(ArtifactError, match="of another shape") as refused:
        go(tokens, tmp_path / "two", **options, **anything)
    assert "if this is intended" not in str(refused.value)


@pytest.mark.parametrize("option", ["load_allow_missing", "load_allow_unexpected"])
def test_a_run_that_resumes_needs_all_tensors(option: str, tokens: str, tmp_path: Path) -> None:
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{flag} x\*: a run that resumes needs all"):
        go(tokens, tmp_path, load="elsewhere", **SMALL, **{option: ["x*"]})


def test_patterns_match_names_with_or_without_prefix() -> None:
    names = ["model.a.weight", "model.b.weight", "model.model.c"]
    assert Allowed.matching(names, ["b.*"]) == ["model.b.weight"]
    assert Allowed.matching(names, ["model.*.weight"]) == ["model.a.weight", "model.b.weight"]
    assert Allowed.matching(names, []) == []
