"""What the options of the data do to a training: several validation sets, made-up data, packed
documents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.pretrain.config import PretrainConfig
from tests.stages.test_certify import found_in
from tests.stages.test_pretrain import OPTIONS, arguments
from tests.trainyard.datasets.test_gpt import write_pair
from tests.trainyard.tokenizers.chat.chats import NAMED, write_folder
from tests.trainyard.tokenizers.models import train as train_pieces
from trainyard.config import from_dict
from trainyard.corpus.indexed import IndexedWriter
from trainyard.errors import ConfigError
from trainyard.testing.kill import Zygote
from trainyard.training.loop.ledger import parse_ledger

SHORT = {"train_iters": 2, "eval_interval": 2}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokens")
    for name, lengths in (("t", [60] * 40), ("u", [60] * 11), ("v", [60] * 7), ("s", [9] * 99)):
        prefix = write_pair(folder / name, lengths)
        for ending in (".bin", ".idx"):
            os.utime(prefix + ending, (1e9, 1e9))  # settled: their digests are remembered
    return str(folder)


def train(zygote: Zygote, save: Path, data: list[str], **options: Any) -> tuple[list[Any], str]:
    words = arguments("x", save, **{**SHORT, **options})
    status, _, log = zygote.run("stages.pretrain", [*data, *words[2:]])
    assert status == 0, log
    return parse_ledger((save / "ledger.jsonl").read_bytes()), log


@pytest.mark.slow
def test_each_validation_set_is_measured_whole_and_by_itself(
    zygote: Zygote, tokens: str, tmp_path: Path
) -> None:
    paths = ["--train-data-path", f"{tokens}/t", "--valid-data-path", f"{tokens}/u", f"{tokens}/v"]
    options = {"multiple_validation_sets": True, "full_validation": True}
    lines, log = train(zygote, tmp_path / "run", paths, **options)
    losses = lines[-1]["validation_losses"]
    assert list(losses) == ["u", "v"]
    assert lines[-1]["validation_loss"] == pytest.approx(sum(losses.values()) / 2)
    assert "valid_samples=41+26" in log  # 660 and 420 tokens, 16 a sample and one more
    assert " validation-0 loss at iteration 2 on validation set | lm loss value: " in log
    assert " validation-1 loss at iteration 2 on validation set | lm loss value: " in log
    alone = [*paths[:3], paths[3]]
    lines, _ = train(zygote, tmp_path / "one", alone, full_validation=True)
    assert lines[-1]["validation_loss"] == pytest.approx(losses["u"], rel=1e-6)


@pytest.mark.slow
def test_indices_of_these_options_are_built_ahead_too(
    zygote: Zygote, tokens: str, tmp_path: Path
) -> None:
    flags = ["--train-data-path", f"{tokens}/t", "--valid-data-path", f"{tokens}/u", f"{tokens}/v"]
    flags += ["--multiple-validation-sets", "--full-validation"]
    numbers = {"seq_length": 16, "global_batch_size": 4, "eval_iters": 1, **SHORT}
    given = [w for k, v in numbers.items() for w in ("--" + k.replace("_", "-"), str(v))]
    out = ["--output-dir", str(tmp_path / "out")]
    status, _, log = zygote.run("stages.index", [*flags, *given, *out])
    assert status == 0, log
    _, log = train(zygote, tmp_path / "run", [*flags, "--data-cache-path", str(tmp_path / "out")])
    assert "saved index" not in log


@pytest.mark.slow
def test_a_last_batch_that_ends_behind_the_run_is_taken_and_proven(
    zygote: Zygote, tokens: str, tmp_path: Path
) -> None:
    table = f"0:2 {4 * 16}:4 {12 * 16 + 5}:8"  # 2 up to 4 samples, 4 up to 12
    options = {"train_samples": 21, "step_batch_size_schedule": table, "save_interval": 4}
    blend = ["--data-path", "1", f"{tokens}/t"]  # makes as many samples as are asked for
    words = arguments("x", tmp_path, **options)[2:]
    for flag in ("--train-iters", "--global-batch-size"):
        del words[(at := words.index(flag)) : at + 2]
    assert zygote.run("stages.pretrain", [*blend, *words, "--exit-interval", "4"])[0] == 143
    status, _, log = zygote.run("stages.pretrain", [*blend, *words])
    assert status == 0, log
    lines = parse_ledger((tmp_path / "ledger.jsonl").read_bytes())
    assert [line["consumed_train_samples"] for line in lines] == [2, 4, 8, 12, 20, 28]
    found = found_in(tmp_path)
    assert found.is_complete, found.sentence


@pytest.mark.slow
def test_made_up_data_trains_without_files(zygote: Zygote, tmp_path: Path) -> None:
    lines, _ = train(zygote, tmp_path / "run", ["--mock-data"])
    assert lines[-1]["step"] == 2
    again, _ = train(zygote, tmp_path / "again", ["--mock-data"])
    assert again == lines


@pytest.mark.slow
def test_masks_and_positions_by_document_change_the_loss_and_nothing_of_the_samples(
    zygote: Zygote, tokens: str, tmp_path: Path
) -> None:
    """No token here is the end of a document, but a document of the file ends all 9 tokens."""
    data = ["--data-path", f"{tokens}/s"]
    plain, _ = train(zygote, tmp_path / "plain", data)
    packed, _ = train(zygote, tmp_path / "p", data, dataloader_inter_document_masking=True)
    masked, _ = train(
        zygote, tmp_path / "m", data, reset_attention_mask=True, reset_position_ids=True
    )
    assert [line["samples"] for line in packed] == [line["samples"] for line in plain]
    assert packed[0]["lm_loss"] != plain[0]["lm_loss"]
    assert masked[0]["lm_loss"] == pytest.approx(plain[0]["lm_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_pad_that_is_the_bos_too_masks_nothing(zygote: Zygote, tmp_path: Path) -> None:
    """<s> is id 1, and stands in the data; so it does as the end of document, id 2, and <unk>."""
    prefix = tmp_path / "t"
    with open(f"{prefix}.bin", "wb") as bin_file, open(f"{prefix}.idx", "wb") as idx_file:
        writer = IndexedWriter(bin_file, np.uint16)
        for k in range(60):
            writer.add_document([np.array([1, *range(k, k + 9), 0, 1, 2])])
        writer.write_index(idx_file)
    losses = []
    for pad in (None, "<s>", "<unk>", "</s>"):
        named = {name: token for name, token in NAMED.items() if name != "pad_token"}
        folder = write_folder(
            tmp_path / f"tokenizer{pad}", named | ({"pad_token": pad} if pad else {})
        )
        options = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": folder}
        words = arguments(str(prefix), tmp_path / f"run{pad}", **{**SHORT, **options})
        at = words.index("--vocab-size")
        status, _, log = zygote.run("stages.pretrain", words[:at] + words[at + 2 :])
        assert status == 0, log
        lines = parse_ledger((tmp_path / f"run{pad}/ledger.jsonl").read_bytes())
        losses.append([(line["lm_loss"], line.get("validation_loss")) for line in lines])
    assert losses == [losses[0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("end", [True, False])
def test_a_tokenizer_without_an_end_of_document_is_told_and_one_without_a_pad_trains(
    zygote: Zygote, tmp_path: Path, end: bool
) -> None:
    model = tmp_path / "a.model"
    model.write_bytes(train_pieces(**({} if end else {"eos_id": -1})))
    options = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(model)}
    words = ["--mock-data", *arguments("x", tmp_path / "run", **{**SHORT, **options})[2:]]
    at = words.index("--vocab-size")
    status, _, log = zygote.run("stages.pretrain", words[:at] + words[at + 2 :])
    assert "Traceback" not in log
    if end:
        assert status == 0, log  # the model has no pad, and needs none
    else:
        assert status == 2, log
        assert f"--tokenizer-model {model} has no piece that ends a sentence" in log


def test_an_external_loader_is_for_programs(tokens: str) -> None:
    options = {**OPTIONS, "data_path": [f"{tokens}/t"], "save": "x", "dataloader_type": "external"}
    with pytest.raises(ConfigError, match="--dataloader-type external"):
        from_dict(PretrainConfig, options)
