"""What a profile needs a GPU for: ranges for nsys, the history of the device's memory.

python -m pytest -m gpu tests/gpu"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainyard.config import from_dict
from trainyard.training.options.pretrain import PretrainConfig
from trainyard.training.pretrain import pretrain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_ranges_and_memory_history_of_a_training(tmp_path: Path) -> None:
    options = {
        "mock_data": True,
        "dataset_size": 64,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 512,
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "seq_length": 64,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "train_iters": 6,
        "lr": 1e-3,
        "eval_iters": 0,
        "compile_layers": "off",
        "profile": True,
        "profile_step_start": 2,
        "profile_step_end": 4,
        "record_memory_history": True,
    }
    pushed: list[str] = []
    push = torch.cuda.nvtx.range_push

    def noted(name: str) -> int:
        pushed.append(name)
        return int(push(name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.nvtx, "range_push", noted)
        config = from_dict(PretrainConfig, {**options, "save": str(tmp_path / "run")})
        assert pretrain(None, None, config).outcome == "finished"
    assert pushed == ["step 3", "step 4"]
    snapshot = tmp_path / "run/logs/memory-history-rank0000.pickle"
    assert b"device_traces" in snapshot.read_bytes()
