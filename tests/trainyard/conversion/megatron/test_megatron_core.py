"""Releases of Megatron core and ours compute the same from each other's checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainyard.checkpoint.samples import PADDED_VOCAB, model_of_source, random_gpt, save_gpt
from tests.trainyard.conversion.megatron import megatron_package
from tests.trainyard.conversion.megatron.megatron_files import Layout, arguments
from tests.trainyard.conversion.megatron.test_read import GPT, LLAMA, QWEN
from trainyard.conversion.loaders import open_source
from trainyard.models.gpt.config import GPTConfig

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).with_name("megatron_core_program.py")
"""Not imported: it is for a process of its own."""

TOKENS = 257
"""That the tokenizer of the sample knows; logits of padding are not ours."""

SAME_LOGITS = {"rtol": 0.0, "atol": 1e-5}

CONFIGS = pytest.mark.parametrize("config", [GPT, LLAMA, QWEN], ids=["gpt", "llama", "qwen"])

RELEASES = ("0.15.3", "0.16.1", "0.19.2")
VERSIONS = pytest.mark.parametrize("version", RELEASES)

SAVERS = ("core", "torch_dist")
RESHARDED = [
    pytest.param(config, SAVERS[(i + j) % 2], version, id=f"{name}-{SAVERS[(i + j) % 2]}-{version}")
    for i, (name, config) in enumerate({"gpt": GPT, "llama": LLAMA, "qwen": QWEN}.items())
    for j, version in enumerate(RELEASES)
]
"""Each model with each release, and each saver with each of both: names of tensors depend on the
model and the saver, their loading on the release and the saver."""

PLAIN = (bool, int, float, str, type(None))


def some_tokens(folder: Path) -> Tensor:
    """[2, 12], as a file too."""
    tokens = torch.randint(0, TOKENS, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, folder / "tokens.pt")
    return tokens


def megatron(version: str, folder: Path, *words: str) -> Tensor:
    """What the model of Megatron core computes of the tokens in a folder, [2, 12, vocabulary]."""
    out = folder / "logits.pt"
    megatron_package.run(version, PROGRAM, [*words, str(folder / "tokens.pt"), str(out)])
    found: Tensor = torch.load(out)
    return found


@pytest.mark.parametrize(("config", "saver", "version"), RESHARDED)
def test_megatron_core_computes_the_same_from_resharded_files(
    tmp_path: Path, config: GPTConfig, saver: str, version: str
) -> None:
    ours = random_gpt(config)
    save_gpt(str(tmp_path / "ours"), ours)
    made = tmp_path / "made"
    # Transformer Engine, which the default is for, needs a GPU.
    names = ["--saver-transformer-impl", "local"] if saver == "core" else []
    command = [sys.executable, "-m", "stages.reshard", "--saver", saver, *names]
    folders = ["--load-dir", str(tmp_path / "ours"), "--save-dir", str(made)]
    subprocess.run([*command, *folders], check=True, timeout=120)
    tokens = some_tokens(tmp_path)
    kind = "torch" if saver == "core" else "torch_dist"
    theirs = megatron(version, tmp_path, "load", kind, str(made / "iter_0000050"))
    with torch.no_grad():
        wanted = ours(tokens)
    assert theirs.shape == (2, 12, PADDED_VOCAB)
    torch.testing.assert_close(theirs[..., :TOKENS], wanted[..., :TOKENS], **SAME_LOGITS)
    assert wanted.std() > 0.1  # not all alike


@VERSIONS
@CONFIGS
def test_ours_computes_the_same_from_files_of_megatron_core(
    tmp_path: Path, config: GPTConfig, version: str
) -> None:
    values = vars(arguments(config, Layout(), PADDED_VOCAB)).items()
    args = {name: value for name, value in values if type(value) in PLAIN}
    (tmp_path / "args.json").write_text(json.dumps(args))
    tokens = some_tokens(tmp_path)
    theirs = megatron(
        version, tmp_path, "save", str(tmp_path / "args.json"), str(tmp_path / "made")
    )
    with open_source(str(tmp_path / "made"), "torch_dist") as source:
        assert source.step == 100
        ours = model_of_source(source)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs, **SAME_LOGITS)
    assert theirs.std() > 0.1
