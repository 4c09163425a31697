"""What `--saver hf` writes, `transformers` loads offline, and it computes the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.trainyard.checkpoint.samples import END, PADDED_VOCAB, random_gpt, save_gpt
from trainyard.artifacts import store
from trainyard.checkpoint.load import open_checkpoint
from trainyard.checkpoint.model import load_model
from trainyard.conversion.huggingface.architecture import architecture
from trainyard.conversion.huggingface.folder import write_hf_folder
from trainyard.conversion.huggingface.to_hf import split_qkv
from trainyard.conversion.native import CheckpointSource
from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.moe_config import MoEConfig

SAME_LOGITS = {"rtol": 1e-5, "atol": 1e-5}

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 24,
    "max_position_embeddings": 48,
}
LLAMA: dict[str, Any] = {
    **SIZES,
    "position_embedding_type": "rope",
    "rotary_base": 50000.0,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "disable_bias_linear": True,
}
GROUPED = {"group_query_attention": True, "num_query_groups": 2, "kv_channels": 12}
ON_INPUT = MoEConfig(
    num_experts=4,
    moe_router_topk=1,
    moe_router_pre_softmax=True,
    moe_apply_probs_on_input=True,
)
UNTIED = {"untie_embeddings_and_output_weights": True}


def export(checkpoint_url: str, folder: Path, num_shards: int) -> None:
    with CheckpointSource(open_checkpoint(checkpoint_url)) as source:
        write_hf_folder(
            source, num_shards, lambda name: store.open_output(str(folder / name), name)
        )


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("config", "num_shards"),
    [
        (GPTConfig(**LLAMA, **UNTIED), 1),
        (GPTConfig(**LLAMA), 2),
        (GPTConfig(**LLAMA, **GROUPED, ffn_hidden_size=48), 3),
        (GPTConfig(**LLAMA, use_rope_scaling=True), 1),
        (GPTConfig(**LLAMA, **UNTIED, window_size="7,0"), 1),
        (GPTConfig(**LLAMA, **UNTIED, add_qkv_bias=True), 2),
        (GPTConfig(**LLAMA, **GROUPED, qk_layernorm=True), 1),
        (GPTConfig(**SIZES), 2),
        (GPTConfig(**SIZES, ffn_hidden_size=80), 1),
    ],
    ids=[
        "llama",
        "llama tied",
        "llama grouped",
        "llama 3.1",
        "mistral",
        "qwen2",
        "qwen3",
        "gpt2",
        "gpt2 wide",
    ],
)
def test_transformers_computes_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: GPTConfig, num_shards: int
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    model = random_gpt(config)
    save_gpt(str(tmp_path / "run"), model)
    export(str(tmp_path / "run"), tmp_path / "hf", num_shards)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(theirs).__name__ == architecture(config)
    assert theirs.dtype == torch.float32
    tokens = torch.randint(0, 257, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = load_model(str(tmp_path / "run")).model(tokens)
        # They do not know that the rows behind the tokens are padding.
        torch.testing.assert_close(theirs.eval()(tokens).logits[..., :257], ours, **SAME_LOGITS)
    files = sorted(p.name for p in (tmp_path / "hf").glob("*.safetensors*"))
    assert len(files) == (1 if num_shards == 1 else num_shards + 1)
    assert (theirs.config.vocab_size, theirs.config.eos_token_id) == (PADDED_VOCAB, 0)
    assert theirs.generation_config.eos_token_id == 0


def test_transformers_loads_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    save_gpt(str(tmp_path / "run"), random_gpt(GPTConfig(**LLAMA)))
    export(str(tmp_path / "run"), tmp_path / "hf", 1)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = load_model(str(tmp_path / "run")).tokenizer
    text = f"the yard, at dawn{END}naive"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert (theirs.eos_token, theirs.eos_token_id) == (END, ours.eod)
    assert theirs.model_max_length == 48


def test_the_export_is_the_same_bytes_again_and_the_index_is_right(tmp_path: Path) -> None:
    save_gpt(str(tmp_path / "run"), random_gpt(GPTConfig(**LLAMA)))
    for name in "ab":
        export(str(tmp_path / "run"), tmp_path / name, 2)
    files = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}
    index = json.loads(files["model.safetensors.index.json"])
    size = 0
    for name, file in index["weight_map"].items():
        tensor = safetensors.torch.load(files[file])[name]
        size += tensor.numel() * tensor.element_size()
    assert index["metadata"]["total_size"] == size


def test_qkv_rows_are_taken_by_query_group() -> None:
    config = GPTConfig(**LLAMA, **GROUPED)
    labels = [f"g{g}{kind}" for g in range(2) for kind in ("q0", "q1", "k", "v")]
    rows = torch.arange(len(labels)).repeat_interleave(12)
    q, k, v = (part[::12].tolist() for part in split_qkv(rows, config))
    assert [labels[i] for i in q] == ["g0q0", "g0q1", "g1q0", "g1q1"]
    assert [labels[i] for i in k] == ["g0k", "g1k"]
    assert [labels[i] for i in v] == ["g0v", "g1v"]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Llama", {"normalization": "LayerNorm"}, "--normalization LayerNorm"),
        ("Llama", {"rotary_percent": 0.5}, r"--rotary-percent 0\.5"),
        ("Llama", {"add_qkv_bias": True, "qk_layernorm": True}, "--add-qkv-bias, --qk-layernorm"),
        ("Llama", {"window_size": "7,0", "qk_layernorm": True}, "--qk-layernorm, --window-size"),
        ("Llama", {"qk_l2_norm": True}, "--qk-l2-norm"),
        ("Qwen3Moe", {"qk_layernorm": True, "moe": ON_INPUT}, "--moe-apply-probs-on-input"),
        ("Llama", {"rotary_interleaved": True}, "--rotary-interleaved"),
        ("Llama", {"apply_layernorm_1p": True}, "--apply-layernorm-1p"),
        ("Llama", {"softmax_type": "learnable"}, "--softmax-type learnable"),
        ("Llama", {"disable_bias_linear": False}, "no --disable-bias-linear"),
        ("Llama", {"swiglu": False}, "no --swiglu"),
        ("Llama", {"position_embedding_type": "none"}, "--position-embedding-type none"),
        (
            "Mistral",
            {"window_size": "7,0", "window_attn_skip_freq": "2"},
            "--window-attn-skip-freq",
        ),
        ("GPT2", UNTIED, "--untie-embeddings-and-output-weights"),
        ("GPT2", GROUPED, "--group-query-attention"),
        ("GPT2", {"disable_bias_linear": True}, "--disable-bias-linear"),
        ("GPT2", {"kv_channels": 16}, "--kv-channels 16"),
    ],
)
def test_a_model_that_no_architecture_computes_is_refused(
    name: str, changes: dict[str, Any], words: str
) -> None:
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    with pytest.raises(ConfigError, match=f"{kind}: .*{words}"):
        architecture(GPTConfig(**{**(SIZES if name == "GPT2" else LLAMA), **changes}))
