"""A release of Megatron core computes the same from our files of a T5, which it loads strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.conversion.megatron import megatron_package
from tests.trainyard.conversion.megatron.converted_runs import ROWS, convert_weights
from trainyard.models.init import init_parameters
from trainyard.models.t5.config import T5Config
from trainyard.models.t5.model import T5Model

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("megatron_t5_program.py")
"""Not imported: it is for a process of its own."""

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "seq_length": 16,
    "decoder_seq_length": 8,
    "init_method_std": 0.1,
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_megatron_core_computes_the_same(tmp_path: Path, tied: bool) -> None:
    config = T5Config(**SIZES, untie_embeddings_and_output_weights=not tied)
    model = T5Model(config, ROWS)
    init_parameters(model, 3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    made = convert_weights(tmp_path, config, weights, transformer_impl="local")
    batch = {
        "text_enc": torch.randint(0, ROWS, (2, 16), generator=generator),
        "text_dec": torch.randint(0, ROWS, (2, 8), generator=generator),
        "enc_mask": (torch.arange(16) < torch.tensor([[16], [9]])).long(),
    }
    torch.save(batch, tmp_path / "batch.pt")
    out = tmp_path / "logits.pt"
    folder = made / "iter_0000100"
    megatron_package.run("0.15.3", PROGRAM, [str(folder), str(tmp_path / "batch.pt"), str(out)])
    with torch.no_grad():
        ours = model.eval()(batch["text_enc"], batch["text_dec"], batch["enc_mask"])
    assert ours.std() > 0.1
    torch.testing.assert_close(torch.load(out), ours, rtol=0.0, atol=1e-5)
