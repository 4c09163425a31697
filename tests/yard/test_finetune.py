"""A checkpoint tuned on questions by one recipe, with answers on the run card, and nothing to do
the second time."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.trainyard.checkpoint.samples import random_gpt, save_gpt
from tests.yard.yard import Yard
from trainyard.models.gpt.config import GPTConfig

pytestmark = [pytest.mark.yard, pytest.mark.timeout(600)]

RECIPE = """
evaluation_data = "{asked}"
[collect]
max_size_mb = 0.01
num_shards = 2
[finetune]
load = "{load}"
chat_template = "{template}"
sft_packing = "lines"
micro_batch_size = 2
train_iters = 4
lr = 1e-3
eval_iters = 1
eval_at_start = true
dataloader_type = "cyclic"
num_threads = 1
[evaluate]
task = "nq"
short_format = true
out_seq_length = 8
[benchmark]
prompts = ["What does json.dumps do?"]
num_tokens_to_generate = 4
"""
TEMPLATE = (
    "{% for turn in messages %}{% if turn.role == 'user' %}Q: {{ turn.content }}\nA:"
    "{% else %} {{ turn.content }}\n{% endif %}{% endfor %}"
)


def test_a_model_is_tuned_and_answers(
    tmp_path: Path, prefect_api: dict[str, str], module_cache: str
) -> None:
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": module_cache})
    model = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=2, seq_length=256)
    save_gpt(str(tmp_path / "base"), random_gpt(model), step=50)
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "asked.json").write_text('[{"question": "why?", "answers": ["because"]}]')
    places = {"load": "base", "template": "chat.jinja", "asked": "asked.json"}
    text = RECIPE
    for name, file in places.items():
        text = text.replace(f"{{{name}}}", str(tmp_path / file))
    recipe = yard.recipe(text)
    first = yard.run("-m", "flows.finetune_gpt", str(recipe))
    assert first.status == 0, first.err
    assert set(first.states().values()) == {"done"}
    assert "validation loss: from " in first.err
    card = Path(first.out.strip().removeprefix("file://")).read_text()
    assert "What does json.dumps do?" in card
    assert "exact match" in card
    again = yard.run("-m", "flows.finetune_gpt", str(recipe))
    assert again.status == 0, again.err
    assert set(again.states().values()) == {"reused"}


REAL = """
[finetune]
load = "{base}"
data_path = ["{data}/sft/alpaca_en.jsonl"]
chat_template = "recipes/chat/plain.jinja"
micro_batch_size = 4
global_batch_size = 16
train_iters = 8
lr = 1e-3
seq_length = 256
eval_iters = 4
eval_at_start = true
num_threads = 1
[benchmark]
prompts = ["Describe a process of making crepes."]
num_tokens_to_generate = 16
"""


@pytest.mark.full
def test_a_converted_llama_learns_from_real_instructions(
    tmp_path: Path, prefect_api: dict[str, str], module_cache: str, shared: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    llama = transformers.LlamaConfig(vocab_size=32128, **size, **heads)
    transformers.LlamaForCausalLM(llama).save_pretrained(tmp_path / "hf")
    data = shared / "data"
    shutil.copy(data / "vocab/hf/llama-tokenizer.json", tmp_path / "hf/tokenizer.json")
    marks = (
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}'
    )
    (tmp_path / "hf/tokenizer_config.json").write_text(marks)
    yard = Yard(tmp_path, {**prefect_api, "TRAINYARD_CACHE": module_cache})
    folders = ["--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "base")]
    converted = yard.run("-m", "stages.reshard", "--loader", "llama_mistral", *folders)
    assert converted.status == 0, converted.err
    recipe = yard.recipe(REAL.format(base=tmp_path / "base", data=data))
    tuned = yard.run("-m", "flows.finetune_gpt", str(recipe))
    assert tuned.status == 0, tuned.err
    before, after = re.search(r"validation loss: from ([\d.]+) to ([\d.]+)", tuned.err).groups()
    assert float(after) < float(before)
    card = Path(tuned.out.strip().removeprefix("file://")).read_text()
    assert "Describe a process of making crepes." in card
