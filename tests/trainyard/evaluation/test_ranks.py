"""Scores on any ranks, from any layout, and after a kill, are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.trainyard.evaluation.models import byte_tokenizer, random_model
from trainyard.checkpoint.model import SCORERS
from trainyard.errors import ConfigError
from trainyard.evaluation.config import EvaluationConfig, QuestionConfig
from trainyard.evaluation.metrics import Row
from trainyard.evaluation.ranks import evaluation_ranks
from trainyard.evaluation.scoring import Request, Scorer
from trainyard.evaluation.tasks import BLOCK, TASKS, NoUnits, Subject, score_all
from trainyard.inference.config import LayoutConfig, SamplingConfig
from trainyard.inference.load import check_family, load_on_ranks
from trainyard.models.bert.config import BertConfig
from trainyard.models.gpt.config import GPTConfig
from trainyard.parallel.groups import ALONE
from trainyard.progress import Progress
from trainyard.testing.pool import RankPool

TOLERANCE = 1e-6
"""Relative: of a score over batch sizes, in fp32."""
OVER_RANKS = 1e-5
"""Relative: of a score over ranks, whose sums have another order."""

TIED = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=32)
LLAMA = GPTConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    seq_length=32,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    untie_embeddings_and_output_weights=True,
)
TEXT = "The yard shunts trains; it is large, and the clerk counts them all day. " * 40


def progress_of(total: int, unit: str, done: int) -> Progress:
    return Progress(total, unit, "test", start=done)


def rows_of(checkpoint: str, data: str, task: Any, tp: int = 1, pp: int = 1) -> list[Row]:
    layout = LayoutConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    with evaluation_ranks(layout, "cpu") as (groups, device):
        loaded = load_on_ranks(checkpoint, device, groups=groups, layout=layout)
        subject = Subject(
            scorer=Scorer(loaded.model, groups, 3),
            tokenizer=loaded.tokenizer,
            path=data,
            config=EvaluationConfig(task=task, overlapping_eval=8, detokenizer="none"),
            questions=QuestionConfig(
                ft_neighbours=0, out_seq_length=8, sampling=SamplingConfig(top_k=0)
            ),
        )
        return score_all(TASKS[task](subject), "a", NoUnits(), groups, progress_of)


@pytest.fixture(scope="module", params=["tied", "llama"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("run"))
    save_gpt(folder, random_gpt({"tied": TIED, "llama": LLAMA}[request.param]))
    return folder


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("tp", "pp", "count"), [(2, 1, 2), (1, 2, 2), (1, 1, 3), (2, 2, 8)])
def test_scores_on_several_ranks_are_those_of_one(
    checkpoint: str, ranks: RankPool, tmp_path: Path, tp: int, pp: int, count: int
) -> None:
    data = tmp_path / "held.txt"
    data.write_text(TEXT)
    alone = rows_of(checkpoint, str(data), "WIKITEXT103")
    assert len(alone) > 3 * BLOCK  # so that copies share blocks
    for found in ranks.run(rows_of, count, checkpoint, str(data), "WIKITEXT103", tp, pp):
        assert [row["example"] for row in found] == list(range(len(alone)))
        losses = [row["loss"] for row in found]
        assert losses == pytest.approx([row["loss"] for row in alone], rel=OVER_RANKS)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_answers_of_a_cut_model_are_those_of_one_rank(
    checkpoint: str, ranks: RankPool, tmp_path: Path, tp: int, pp: int
) -> None:
    data = tmp_path / "questions.json"
    asked = [{"question": f"{n}{c}?", "answers": [c]} for n, c in enumerate("abcde")]
    data.write_text(json.dumps(asked))
    alone = rows_of(checkpoint, str(data), "nq")
    assert len({row["pred"] for row in alone}) > 1
    for found in ranks.run(rows_of, 2, checkpoint, str(data), "nq", tp, pp):
        assert found == alone


def test_a_family_that_does_not_predict_the_next_token_is_refused() -> None:
    bert = BertConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=32)
    with pytest.raises(ConfigError, match="holds a bert, which does not predict the next token"):
        check_family("runs/b", bert, SCORERS)


def test_the_batch_size_changes_no_score() -> None:
    model, generator = random_model(64), torch.Generator().manual_seed(5)
    requests = [
        Request(torch.randint(0, 257, (n,), generator=generator).tolist(), max(1, n // 3))
        for n in (2, 65, 17, 40, 33, 9, 64, 3, 50, 21)
    ]
    alone = Scorer(model, batch_size=1).score(requests)
    for size in (2, 3, 10):
        together = Scorer(model, batch_size=size).score(requests)
        assert [s.loss for s in together] == pytest.approx([s.loss for s in alone], rel=TOLERANCE)
        assert [s.predicted for s in together] == [s.predicted for s in alone]


class Kept(dict[str, Any]):
    """Units in memory; publishing more than `limit` of them is a kill."""

    limit = 10**9

    def publish(self, key: str, document: dict[str, Any]) -> None:
        if len(self) == self.limit:
            raise KeyboardInterrupt
        self[key] = document

    def published(self, key: str) -> dict[str, Any] | None:
        return self.get(key)


class Counted:
    """Examples that know which of them were scored."""

    protocol: Any = None
    unit = "examples"

    def __init__(self, count: int, on_score: Callable[[range], None]) -> None:
        self._count, self._on_score = count, on_score

    def __len__(self) -> int:
        return self._count

    def score(self, numbers: range) -> list[Row]:
        self._on_score(numbers)
        return [{"example": number} for number in numbers]


def test_a_killed_evaluation_goes_on_where_it_was() -> None:
    scored: list[int] = []
    units, examples = Kept(), Counted(5 * BLOCK + 7, scored.extend)
    units.limit = 3
    with pytest.raises(KeyboardInterrupt):
        score_all(examples, "a", units, ALONE, progress_of)  # type: ignore[arg-type]
    assert scored == list(range(4 * BLOCK))
    units.limit, scored[:] = 10**9, []
    rows = score_all(examples, "a", units, ALONE, progress_of)  # type: ignore[arg-type]
    assert scored == list(range(3 * BLOCK, 5 * BLOCK + 7))
    assert [row["example"] for row in rows] == list(range(5 * BLOCK + 7))


def test_a_tokenizer_that_is_not_the_models_is_refused(checkpoint: str, tmp_path: Path) -> None:
    from trainyard.tokenizers.config import TokenizerConfig

    other = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")
    with pytest.raises(ConfigError, match="was trained with another tokenizer than that of"):
        load_on_ranks(checkpoint, torch.device("cpu"), tokenizer=other)
    assert byte_tokenizer().vocab_size == 257


def test_a_model_that_the_ranks_do_not_divide_is_refused(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"--num-attention-heads \(4\) must be divisible by"):
        load_on_ranks(
            checkpoint,
            torch.device("cpu"),
            layout=LayoutConfig(tensor_model_parallel_size=3),
        )
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-size 4 is more than the"):
        load_on_ranks(
            checkpoint,
            torch.device("cpu"),
            layout=LayoutConfig(pipeline_model_parallel_size=4),
        )
