"""Data options of a training: validation sets, mock data, packed documents, tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.pretrain.config import PretrainConfig
from tests.stages.pretrain_runs import OPTIONS, Pretrain, flags, ledger, settled_pair
from tests.stages.test_certify import found_in
from tests.trainyard.tokenizers.chat.chats import NAMED, write_folder
from tests.trainyard.tokenizers.models import train as train_pieces
from trainyard.config import from_dict
from trainyard.corpus.indexed import IndexedWriter
from trainyard.errors import ConfigError
from trainyard.testing.kill import Zygote

SHORT = {"train_iters": 2, "eval_interval": 2}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokens")
    for name, lengths in (("t", [60] * 40), ("u", [60] * 11), ("v", [60] * 7), ("s", [9] * 99)):
        settled_pair(folder / name, lengths)
    return str(folder)


def train(pretrain: Pretrain, save: Path, **options: Any) -> list[Any]:
    pretrain(save, **{**SHORT, "data_path": None, **options})
    return ledger(save)


@pytest.mark.slow
def test_each_validation_set_has_its_own_loss(
    pretrain: Pretrain, tokens: str, tmp_path: Path
) -> None:
    paths = {"data_path": None, "train_data_path": f"{tokens}/t", "full_validation": True, **SHORT}
    valid = [f"{tokens}/u", f"{tokens}/v"]
    several = {"valid_data_path": valid, "multiple_validation_sets": True}
    log = pretrain(tmp_path / "run", **paths, **several)
    last = ledger(tmp_path / "run")[-1]
    losses = last["validation_losses"]
    assert list(losses) == ["u", "v"]
    assert last["validation_loss"] == pytest.approx(sum(losses.values()) / 2)
    assert "valid_samples=41+26" in log  # 660 and 420 tokens, 16 a sample and one more
    assert " validation-0 loss at iteration 2 on validation set | lm loss value: " in log
    assert " validation-1 loss at iteration 2 on validation set | lm loss value: " in log
    lines = train(pretrain, tmp_path / "one", **paths, valid_data_path=valid[0])
    assert lines[-1]["validation_loss"] == pytest.approx(losses["u"], rel=1e-6)


@pytest.mark.slow
def test_the_index_stage_builds_the_indices_of_these_options(
    pretrain: Pretrain, zygote: Zygote, tokens: str, tmp_path: Path
) -> None:
    paths = {"train_data_path": f"{tokens}/t", "valid_data_path": [f"{tokens}/u", f"{tokens}/v"]}
    data = {**paths, "multiple_validation_sets": True, "full_validation": True, **SHORT}
    numbers = {"seq_length": 16, "global_batch_size": 4, "eval_iters": 1}
    words = flags({**data, **numbers, "output_dir": tmp_path / "out"})
    status, _, log = zygote.run("stages.index", words)
    assert status == 0, log
    cached = {**data, "data_path": None, "data_cache_path": tmp_path / "out"}
    assert "saved index" not in pretrain(tmp_path / "run", **cached)


@pytest.mark.slow
def test_last_batch_may_exceed_the_run(pretrain: Pretrain, tokens: str, tmp_path: Path) -> None:
    table = f"0:2 {4 * 16}:4 {12 * 16 + 5}:8"  # 2 up to 4 samples, 4 up to 12
    options = {"train_samples": 21, "step_batch_size_schedule": table, "save_interval": 4}
    options |= {"train_iters": None, "global_batch_size": None}
    options |= {"data_path": [1, f"{tokens}/t"]}  # makes as many samples as are asked for
    pretrain(tmp_path, **options, exit_interval=4, expect=143)
    pretrain(tmp_path, **options)
    consumed = [line["consumed_train_samples"] for line in ledger(tmp_path)]
    assert consumed == [2, 4, 8, 12, 20, 28]
    found = found_in(tmp_path)
    assert found.is_complete, found.sentence


@pytest.mark.slow
def test_mock_data_trains_without_files(pretrain: Pretrain, tmp_path: Path) -> None:
    lines = train(pretrain, tmp_path / "run", mock_data=True)
    assert lines[-1]["step"] == 2
    assert train(pretrain, tmp_path / "again", mock_data=True) == lines


@pytest.mark.slow
def test_masks_by_document_do_not_change_the_samples(
    pretrain: Pretrain, tokens: str, tmp_path: Path
) -> None:
    """No token here is the end of a document, but a document of the file ends all 9 tokens."""
    data = {"data_path": f"{tokens}/s"}
    masks = {"reset_attention_mask": True, "reset_position_ids": True}
    plain = train(pretrain, tmp_path / "plain", **data)
    packed = train(pretrain, tmp_path / "p", **data, dataloader_inter_document_masking=True)
    masked = train(pretrain, tmp_path / "m", **data, **masks)
    assert [line["samples"] for line in packed] == [line["samples"] for line in plain]
    assert packed[0]["lm_loss"] != plain[0]["lm_loss"]
    assert masked[0]["lm_loss"] == pytest.approx(plain[0]["lm_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_pad_token_that_is_also_bos_masks_nothing(pretrain: Pretrain, tmp_path: Path) -> None:
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
        data = {"data_path": prefix, "vocab_size": None}
        lines = train(pretrain, tmp_path / f"run{pad}", **options, **data)
        losses.append([(line["lm_loss"], line.get("validation_loss")) for line in lines])
    assert losses == [losses[0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("end", [True, False])
def test_eod_is_required_and_a_pad_token_is_not(
    pretrain: Pretrain, tmp_path: Path, end: bool
) -> None:
    model = tmp_path / "a.model"
    model.write_bytes(train_pieces(**({} if end else {"eos_id": -1})))
    options = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(model)}
    options |= {"data_path": None, "mock_data": True, "vocab_size": None, **SHORT}
    log = pretrain(tmp_path / "run", expect=0 if end else 2, **options)
    assert "Traceback" not in log
    no_end = f"--tokenizer-model {model} has no end-of-sentence piece"
    assert (no_end in log) is not end  # the model has no pad, and needs none


def test_only_programs_can_use_an_external_loader(tokens: str) -> None:
    options = {**OPTIONS, "data_path": [f"{tokens}/t"], "save": "x", "dataloader_type": "external"}
    with pytest.raises(ConfigError, match="--dataloader-type external"):
        from_dict(PretrainConfig, options)
