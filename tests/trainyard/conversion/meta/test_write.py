"""Writing Llama checkpoints in Meta's layout, and what that layout cannot hold."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainyard.conversion.meta.meta_program import files_of, meta_logits
from tests.trainyard.conversion.meta.test_read import PUBLISHED, write_meta
from trainyard.artifacts import store
from trainyard.checkpoint.safetensors.file import spec_of
from trainyard.conversion.lazy_tensors import About, AssembledSource, TensorRecipe, as_is
from trainyard.conversion.meta.params import ffn_fields, params_document, rounded_up
from trainyard.conversion.meta.read import open_meta
from trainyard.conversion.meta.write import write_meta_folder
from trainyard.conversion.source import Source
from trainyard.conversion.tokenizer_files import Carried
from trainyard.conversion.write_native import check_source
from trainyard.errors import ConfigError
from trainyard.models.gpt.config import GPTConfig
from trainyard.models.gpt.model import GPTModel

SAME_LOGITS = {"rtol": 1e-5, "atol": 1e-5}

ROWS = 24

LLAMA: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 40},
    **{"seq_length": 4096, "max_position_embeddings": 4096, "position_embedding_type": "rope"},
    **{"normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "make_vocab_size_divisible_by": ROWS},
    "untie_embeddings_and_output_weights": True,
}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
LLAMA3 = {"rotary_base": 500000.0, "seq_length": 8192, "max_position_embeddings": 8192}
WIDE_HEADS = {"kv_channels": 16, "seq_length": 32768, "max_position_embeddings": 32768}


class Memory:
    """Tensors by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.specs = {name: spec_of(tensor) for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name].clone()

    def close(self) -> None:
        pass


def model_of(config: GPTConfig, seed: int = 3) -> GPTModel:
    model = GPTModel(config, ROWS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "layernorm" in name else 0.0
            parameter.copy_(center + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def source_of(model: GPTModel, files: dict[str, bytes] | None = None, **about: Any) -> Source:
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    recipes = {name: TensorRecipe((name,), as_is) for name in tensors}
    about_model = About("there", model.config, ROWS, Carried(files or {}, about.get("tokens")))
    return AssembledSource(about_model, recipes, Memory(tensors))


def write(source: Source, folder: Path, num_files: int = 1) -> list[str]:
    """The names of the files, in the order in which they were begun."""
    names: list[str] = []
    counted: dict[str, list[int]] = {"expected": [], "written": []}

    def open_file(name: str) -> Any:
        names.append(name)
        return store.open_output(str(folder / name), name)

    write_meta_folder(
        source,
        open_file,
        num_files=num_files,
        expect=counted["expected"].append,
        advance=counted["written"].append,
    )
    assert counted["expected"] == [sum(counted["written"])]
    return names


TOKENS = torch.randint(0, ROWS, (2, 12), generator=torch.Generator().manual_seed(5))

KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "1": ({}, 1),
    "2 on two ranks": (GROUPED, 2),
    "3 on two ranks": ({**GROUPED, **LLAMA3}, 2),
    "3.2, tied": (
        {
            **{**GROUPED, **LLAMA3, "untie_embeddings_and_output_weights": False},
            **{"use_rope_scaling": True, "rope_scaling_factor": 32.0},
        },
        2,
    ),
    "Mistral": ({**GROUPED, "window_size": "4,0"}, 1),
    "Mistral of wide heads": (WIDE_HEADS, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_meta_computes_what_the_model_computes(kind: str, tmp_path: Path) -> None:
    changes, num_files = KINDS[kind]
    model = model_of(GPTConfig(**{**LLAMA, **changes}))
    write(source_of(model), tmp_path, num_files)
    with torch.no_grad():
        torch.testing.assert_close(meta_logits(tmp_path, TOKENS), model(TOKENS), **SAME_LOGITS)


@pytest.mark.parametrize(("theta", "rows_cut"), [(10000.0, False), (500000.0, True)])
def test_files_of_meta_come_in_and_go_out_alike(
    theta: float, rows_cut: bool, tmp_path: Path
) -> None:
    """Written by torch and by hand, not by ours."""
    there, here = tmp_path / "there", tmp_path / "here"
    shapes = {
        **{"tok_embeddings": (ROWS, 16), "norm": (16,), "output": (ROWS, 16)},
        **{"layers.0.attention.wq": (16, 16), "layers.0.attention.wk": (8, 16)},
        **{"layers.0.attention.wv": (8, 16), "layers.0.attention.wo": (16, 16)},
        **{"layers.0.feed_forward.w1": (48, 16), "layers.0.feed_forward.w3": (48, 16)},
        **{"layers.0.feed_forward.w2": (16, 48), "layers.0.attention_norm": (16,)},
        "layers.0.ffn_norm": (16,),
    }
    generator = torch.Generator().manual_seed(1)
    tensors = {f"{n}.weight": torch.randn(s, generator=generator) for n, s in shapes.items()}
    params = {
        **{"dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5},
        **{"vocab_size": ROWS, "multiple_of": 16, "rope_theta": theta},
    }
    write_meta(there, tensors, 2, params, rows_cut)
    with open_meta(str(there)) as source:
        model = GPTModel(source.config, ROWS).eval()
        model.load_state_dict({n.removeprefix("model."): source.read(n) for n in source.specs})
        write(source, here, 2)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), meta_logits(there, TOKENS), **SAME_LOGITS)
    for before, after in zip(files_of(there), files_of(here), strict=True):
        del before["rope.freqs"]
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    written = json.loads((here / "params.json").read_text())
    assert {"rope_theta": theta, **written} == params


# --- out and in again -----------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> tuple[GPTConfig, int, torch.dtype]:
    num_files = draw(st.sampled_from([1, 2, 4]))
    groups = num_files * draw(st.integers(1, 2))
    heads, d = groups * draw(st.integers(1, 2)), draw(st.sampled_from([2, 4, 6]))
    theta, positions = draw(
        st.sampled_from([(10000.0, 4096), (500000.0, 8192), (1000000.0, 16384)])
    )
    changes: dict[str, Any] = {
        **{"num_layers": draw(st.integers(1, 2)), "num_attention_heads": heads},
        **{"hidden_size": heads * d, "ffn_hidden_size": num_files * draw(st.integers(1, 40))},
        **{"rotary_base": theta, "seq_length": positions, "max_position_embeddings": positions},
    }
    if groups != heads:
        changes |= {"group_query_attention": True, "num_query_groups": groups}
    if num_files == 1 and draw(st.booleans()):
        changes |= {**WIDE_HEADS, "window_size": draw(st.sampled_from([None, "7,0"]))}
    elif theta == 500000.0 and draw(st.booleans()):
        factor = draw(st.sampled_from([8.0, 32.0]))
        changes |= {"use_rope_scaling": True, "rope_scaling_factor": factor}
        changes |= {"seq_length": 131072, "max_position_embeddings": 131072}
    can_be_tied = num_files == 1 or theta == 500000.0
    changes["untie_embeddings_and_output_weights"] = not (can_be_tied and draw(st.booleans()))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return GPTConfig(**{**LLAMA, **changes}), num_files, dtype


@pytest.mark.slow
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=models())
def test_out_and_in_again_is_the_same(
    drawn: tuple[GPTConfig, int, torch.dtype], tmp_path_factory: pytest.TempPathFactory
) -> None:
    config, num_files, dtype = drawn
    folder = tmp_path_factory.mktemp("meta")
    source = source_of(model_of(config).to(dtype))
    names = write(source, folder, num_files)
    assert names == [*(f"consolidated.{rank:02d}.pth" for rank in range(num_files)), "params.json"]
    with open_meta(str(folder)) as again:
        check_source(again)
        assert again.config == config
        assert again.specs == source.specs
        assert all(torch.equal(again.read(name), source.read(name)) for name in source.specs)


def test_tied_embeddings_are_stored_once_under_both_names(tmp_path: Path) -> None:
    config = GPTConfig(**{**LLAMA, "untie_embeddings_and_output_weights": False})
    write(source_of(model_of(config)), tmp_path)
    (file,) = files_of(tmp_path)
    embedding, output = file["tok_embeddings.weight"], file["output.weight"]
    assert embedding.data_ptr() == output.data_ptr()
    bytes_of_tensors = sum(tensor.nbytes for tensor in file.values()) - output.nbytes
    assert (tmp_path / "consolidated.00.pth").stat().st_size < bytes_of_tensors + 8192


def test_the_tokenizer_goes_with_it_without_our_description(tmp_path: Path) -> None:
    files = {"tokenizer.model": b"pieces", "trainyard_tokenizer.json": b"{}"}
    names = write(source_of(model_of(GPTConfig(**LLAMA)), files), tmp_path)
    assert names == ["consolidated.00.pth", "tokenizer.model", "params.json"]
    assert (tmp_path / "tokenizer.model").read_bytes() == b"pieces"


def test_missing_facts_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = GPTConfig(**{**LLAMA, "seq_length": 64, "max_position_embeddings": 64})
    with caplog.at_level(logging.WARNING):
        write(source_of(model_of(config), tokens=23), tmp_path)
    text = caplog.text
    assert "the longest sequence, which is 64" in text
    assert "--loader llama_mistral will assume 4096" in text
    assert "24 rows for 23 tokens" in text
    assert "there carries no tokenizer.model" in text


# --- params.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_widths_of_the_mlp(name: str) -> None:
    hidden, ffn = PUBLISHED[name][0]["dim"], PUBLISHED[name][1].get("ffn_size", 14336)
    fields = ffn_fields(hidden, ffn)
    assert rounded_up(hidden, fields.get("ffn_dim_multiplier"), fields["multiple_of"]) == ffn
    assert len(f"{fields.get('ffn_dim_multiplier', 1.0)}") == 3  # such as 1.3


@given(st.integers(2, 20000), st.integers(1, 200000))
@settings(max_examples=40, deadline=None)
def test_every_width_of_the_mlp_can_be_expressed(hidden: int, ffn: int) -> None:
    fields = ffn_fields(hidden, ffn)
    size = int(2 * (4 * hidden) / 3)  # as Meta's FeedForward finds it
    if "ffn_dim_multiplier" in fields:
        size = int(fields["ffn_dim_multiplier"] * size)
    step = fields["multiple_of"]
    assert step * ((size + step - 1) // step) == ffn


def test_only_fields_of_its_program_are_written() -> None:
    plain = params_document(GPTConfig(**LLAMA), ROWS)
    assert plain.keys() == {
        *("dim", "n_layers", "n_heads", "norm_eps", "vocab_size", "multiple_of"),
        "ffn_dim_multiplier",
    }
    windowed = GPTConfig(**{**LLAMA, "window_size": "4095,0"})
    assert params_document(windowed, ROWS) == {
        **{"dim": 32, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5, "vocab_size": ROWS},
        **{"head_dim": 8, "hidden_dim": 40, "n_kv_heads": 4, "rope_theta": 10000.0},
        "sliding_window": 4096,
    }


# --- refusals -------------------------------------------------------------------------------------

TIED = {"untie_embeddings_and_output_weights": False}


@pytest.mark.parametrize(
    ("changes", "num_files", "words"),
    [
        ({"disable_bias_linear": False}, 1, "no --disable-bias-linear"),
        ({"add_qkv_bias": True}, 1, "a model with --add-qkv-bias"),
        ({"qk_layernorm": True}, 1, "a model with --qk-layernorm"),
        ({"normalization": "LayerNorm"}, 1, "LayerNorm .must be RMSNorm"),
        ({"swiglu": False}, 1, "no --swiglu"),
        ({"position_embedding_type": "yarn"}, 1, "a model with --position-embedding-type yarn"),
        ({"position_embedding_type": "learned_absolute"}, 1, "learned_absolute .must be rope"),
        ({"rotary_percent": 0.5}, 1, "--rotary-percent 0.5"),
        ({"rotary_seq_len_interpolation_factor": 2.0}, 1, "interpolation-factor 2.0"),
        ({"window_size": "7,0", "window_attn_skip_freq": "2"}, 1, "--window-attn-skip-freq"),
        ({"window_size": "7,0", "use_rope_scaling": True}, 1, "--use-rope-scaling in a model"),
        (
            {"use_rope_scaling": True, "rope_scaling_original_max_position_embeddings": 4096},
            1,
            "rope-scaling-original-max-position-embeddings 4096 .must be 8192",
        ),
        ({"window_size": "7,0"}, 2, "with --window-size 7,0 is written as Mistral's"),
        (WIDE_HEADS, 2, "with --kv-channels is written as Mistral's"),
        (GROUPED, 4, "2 key and value heads must be divisible by --target-tensor-parallel-size 4"),
        ({"ffn_hidden_size": 41}, 2, "41 channels of the MLP must be divisible"),
        (TIED, 2, "this model's embedding is its output layer"),
        ({"ffn_hidden_size": 10**9}, 1, "cannot describe --ffn-hidden-size 1000000000"),
    ],
)
def test_an_unsupported_model_is_refused_before_anything_is_written(
    changes: dict[str, Any], num_files: int, words: str
) -> None:
    with torch.device("meta"):
        model = GPTModel(GPTConfig(**{**LLAMA, "num_layers": 2, **changes}), ROWS)

    def open_file(name: str) -> Any:
        raise AssertionError(name)

    with pytest.raises(ConfigError, match=words):
        write_meta_folder(source_of(model), open_file, num_files=num_files)


def test_indivisible_rows_are_refused(tmp_path: Path) -> None:
    config = GPTConfig(
        **{**LLAMA, "hidden_size": 40, "num_attention_heads": 5, "ffn_hidden_size": 40}
    )
    with pytest.raises(ConfigError, match=r"24 rows must be divisible by .*-size 5; --make-vocab"):
        write(source_of(model_of(config)), tmp_path, 5)
    assert not list(tmp_path.iterdir())
