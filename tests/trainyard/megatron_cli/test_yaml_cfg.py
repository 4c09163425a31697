"""Megatron-LM's files of options."""

from __future__ import annotations

from typing import Any

import pytest

from stages.pretrain.config import PretrainConfig
from tests.trainyard.megatron_cli.shipped import SHIPPED
from trainyard.config import from_dict
from trainyard.errors import ConfigError
from trainyard.megatron_cli.yaml_cfg import read_yaml_cfg


def read(text: str, environ: dict[str, str] | None = None, **given: str) -> dict[str, Any]:
    return read_yaml_cfg(text, PretrainConfig, environ or {}, "f.yaml", given)[0]


def test_the_shipped_file_makes_a_valid_config() -> None:
    document, remarks = read_yaml_cfg(SHIPPED, PretrainConfig, {}, "f.yaml")
    places = {"save": "s", "data_path": ["d"], "tokenizer_model": "t"}
    config = from_dict(PretrainConfig, {**document, **places})
    model, training = config.model, config.training
    assert (model.activation, model.norm_epsilon, model.apply_layernorm_1p) == (
        "swiglu",
        1e-5,
        True,
    )
    assert (model.disable_bias_linear, model.bias_gelu_fusion) == (True, False)
    assert (model.position_embedding_type, model.rotary_percent) == ("rope", 0.5)
    assert (training.train_samples, training.train_iters) == (268554688, None)
    assert training.rampup_batch_size == (32, 32, 65324160)
    assert (config.precision.bf16, config.optimizer.lr) == (True, 2.5e-4)
    assert not config.parallel.sequence_parallel
    assert "f.yaml: sequence_parallel: turned off, as tensor_model_parallel_size is 1" in remarks
    assert any("exit_signal_handler: ignored: SIGTERM" in r for r in remarks)
    assert any("masked_softmax_fusion" in r and ": ignored: " in r for r in remarks)
    assert not any("fp8, " in r or "onnx_safe" in r for r in remarks)  # null is not reported


def test_flags_and_keys_of_the_tensor_parallel_size_keep_sequence_parallel_on() -> None:
    text = "sequence_parallel: true"
    assert read(text) == {}
    assert read(text, **{"tensor-model-parallel-size": "2"}) == {"sequence_parallel": True}
    assert read(text + "\ntensor_model_parallel_size: 2")["sequence_parallel"] is True


def test_made_up_data_needs_no_tokenizer() -> None:
    made = {"mock_data": True, "vocab_size": 9, "tokenizer_type": "NullTokenizer"}
    assert read("mock_data: true\nvocab_size: 9") == made
    assert read("mock_data: true", **{"vocab-size": "9"})["tokenizer_type"] == "NullTokenizer"
    assert "tokenizer_type" not in read("mock_data: true")
    assert "tokenizer_type" not in read("mock_data: false\nvocab_size: 9")
    assert "tokenizer_type" not in read(
        "mock_data: true\nvocab_size: 9", **{"tokenizer-type": "GPT2BPETokenizer"}
    )
    named = read("mock_data: true\nvocab_size: 9\ntokenizer_type: TikTokenizer")
    assert named["tokenizer_type"] == "TikTokenizer"


def test_no_load_optim_needs_finetune() -> None:
    assert read("finetune: true\nno_load_optim: true") == {"finetune": True}
    assert read("no_load_optim: true") == {"load_optim": False}


@pytest.mark.parametrize(
    ("text", "document"),
    [
        ("", {}),
        ("num_layers: 2\nlr: 1e-4", {"num_layers": 2, "lr": 1e-4}),
        (
            "model: {hidden_size: 8, num_layers: 2}\ntraining: {batch_size: 4, seq_length: 16}",
            {"hidden_size": 8, "num_layers": 2, "micro_batch_size": 4, "seq_length": 16},
        ),
        ("train_steps: 5\nwarmup_steps: 1", {"train_iters": 5, "lr_warmup_iters": 1}),
        ("add_bias_linear: false", {"disable_bias_linear": True}),
        ("add_bias_linear: true", {"disable_bias_linear": False}),
        ("disable_bias_linear: true", {"disable_bias_linear": True}),
        ("no_save_optim: true", {"save_optim": False}),
        ("layernorm_epsilon: 1.e-6", {"norm_epsilon": 1e-6}),
        ("activation_func: squaredrelu", {"squared_relu": True}),
        ("activation_func: quick_gelu", {"quick_gelu": True}),
        ("activation_func: gelu\ngated_linear_unit: false", {}),
        ("activation_func: swiglu\ngated_linear_unit: true\nswiglu: true", {"swiglu": True}),
        ("fp8: hybrid\nfp8_param: true\nfp8_wgrad: true", {"fp8_format": "hybrid"}),
        ("fp8: False", {}),
        ("moe_layer_recompute: False", {}),
        (
            "num_moe_experts: 8\nexpert_model_parallel_size: 2\nfp8: null",
            {"num_experts": 8, "expert_model_parallel_size": 2},
        ),
        ("bias_activation_fusion: false", {"bias_gelu_fusion": False}),
        (
            "virtual_pipeline_model_parallel_size: 2",
            {"num_virtual_stages_per_pipeline_rank": 2},
        ),
        ("window_size: [4095, 0]", {"window_size": "4095,0"}),
        (
            "split: [9, 1, 0]\ndata_path: 0.3 a 0.7 b",
            {"split": "9,1,0", "data_path": ["0.3", "a", "0.7", "b"]},
        ),
        ("data_path: [0.3, a, 0.7, b]", {"data_path": ["0.3", "a", "0.7", "b"]}),
        ("iterations_to_skip: 5", {"iterations_to_skip": [5]}),
        ("train_samples: 1e6", {"train_samples": 1_000_000}),
        ("use_rotary_position_embeddings: true", {"position_embedding_type": "rope"}),
        (
            "add_position_embedding: false\nposition_embedding_type: rope",
            {"position_embedding_type": "rope"},
        ),
        ("rerun_mode: report_stats", {"rerun_mode": "report_determinism_stats"}),
        ("_base: &b {num_layers: 2}\nx:\n  <<: *b\n  lr: 1.0", None),
        ("x: &b {lr: 1.0}", {"lr": 1.0}),
        ("init_method: null\ntimers: null\nno_sync_func: null", {}),
    ],
)
def test_keys_are_translated(text: str, document: Any) -> None:
    if document is None:
        with pytest.raises(ConfigError, match="num_layers occurs twice"):
            read(text)
        return
    assert read(text) == document


def test_environment_variables_are_replaced() -> None:
    environ = {"N": "12", "R": "1e-4", "D": "/data", "T": "true", "P": "0.5 a 0.5 b"}
    text = """
    num_layers: ${N}
    lr: ${R}
    save: "${D}/run-${N}"
    bf16: ${T}
    hidden_size: "${N}"
    fp16: "false"
    data_path: ${P}
    """
    assert read(text, environ) == {
        **{"num_layers": 12, "lr": 1e-4, "save": "/data/run-12", "bf16": True},
        **{"hidden_size": 12, "fp16": False, "data_path": ["0.5", "a", "0.5", "b"]},
    }
    with pytest.raises(ConfigError, match=r"line 2: the environment variable NO is not set"):
        read("lr: 1.0\nsave: ${NO}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1\nlr: 2", r"lr occurs twice, in line 1 and in line 2; remove one"),
        ("a: {lr: 1}\nlr: 2", r"lr occurs twice, in line 1 in a and in line 2"),
        ("a: {b: {lr: 1}}", "b is a section in the section a"),
        ("[1, 2]", "must be a table"),
        ("a: [", "not well-formed YAML"),
        ("x: !!python/name:os.system", "not well-formed YAML"),
        ("num_layer: 2", r"line 1: num_layer is not an option: did you mean num_layers"),
        ("fp8_wgrad: False", "fp8_wgrad: False is not supported"),
        ("fp4: e2m1", "fp4: 'e2m1' is not supported"),
        ("moe_input_jitter_eps: 0.1", "moe_input_jitter_eps: 0.1 is not supported"),
        ("activation_func: tanh", "choose one of gelu, swiglu"),
        ("gated_linear_unit: true", "for a gated MLP, give activation_func swiglu"),
        ("activation_func: swiglu\nswiglu: false", "contradicts swiglu: False in line 2"),
        ("add_position_embedding: false", "give position_embedding_type rope, or none"),
        ("cpu_offloading: true", "give cpu_offloading_num_layers too"),
        ("train_steps: 5\ntrain_iters: 5", "train_iters and train_steps set the same option"),
        ("add_bias_linear: maybe", "add_bias_linear must be true or false, got 'maybe'"),
        ("world_size: many", "line 1: world_size must be a whole number above 0, got 'many'"),
        ("world_size: 0", "world_size must be a whole number above 0, got 0"),
        ("ckpt_step: 5", "give it on the command line, --ckpt-step 5"),
        ("moe_layer_recompute: True", "give it on the command line, --moe-layer-recompute$"),
        (
            "moe_router_load_balancing_type: sinkhorn",
            "moe_router_load_balancing_type: sinkhorn: balance by Sinkhorn's iterations",
        ),
        (
            "a: {world_size: 8}\nnproc_per_node: 4",
            "line 1 in a: world_size 8 contradicts nproc_per_node 4 in line 2",
        ),
        ("apply_residual_connection_post_layernorm: true", "not supported: it changes the model"),
    ],
)
def test_errors_name_the_line_and_section(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_world_size_sets_the_ranks_to_start_unless_flags_or_a_launcher_do() -> None:
    text = "world_size: 8"
    assert read(text) == {"nproc_per_node": 8}
    assert read(text + "\nnproc_per_node: 8") == {"nproc_per_node": 8}
    assert read("world_size: null") == {}
    for name in ("world-size", "nproc-per-node"):  # flags override the file
        assert read(text, **{name: "4"}) == {}
    assert read(text, {"RANK": "3", "WORLD_SIZE": "8"}) == {}
    with pytest.raises(ConfigError, match="world_size 8: the launcher started 4 ranks"):
        read(text, {"RANK": "3", "WORLD_SIZE": "4"})


def test_a_signal_that_no_run_handles_is_refused() -> None:
    assert read("exit_signal: SIGUSR1\nexit_signal_handler: true") == {"exit_signal_handler": True}
    with pytest.raises(ConfigError, match=r"f.yaml, line 2.*exit_signal: SIGUSR2: a run saves"):
        read("num_layers: 2\nexit_signal: SIGUSR2")
