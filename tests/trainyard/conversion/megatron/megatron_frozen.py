"""Checkpoints that Megatron-LM's own programs wrote, kept in tests/golden/megatron, and how they
were made:

    python -m tests.trainyard.conversion.megatron.megatron_frozen

makes them anew, each by a release from the package index. Of those from 0.17 on the package holds
the training code, so parser and `save_checkpoint` are Megatron-LM's. Of 0.15 and 0.16 it holds the
core alone: there the model and `dist_checkpointing.save` are the release's, the args those that the
parser of 0.17 leaves, and the weights alone are kept."""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.trainyard.conversion.megatron import megatron_core_program, megatron_package
from trainyard.conversion.megatron.written_args import KEPT_ARGS

GOLDEN = Path(__file__).parents[3] / "golden" / "megatron"

TOLD = GOLDEN / "told.json"
"""Of each: its iteration, digests of its weights, and the args that its loader takes from it."""

CORE_PROGRAM = Path(str(megatron_core_program.__file__))
TRAINING_PROGRAM = CORE_PROGRAM.with_name("megatron_training_program.py")

OF_THE_CONVERSION = ("ckpt_format", "padded_vocab_size", "tensor_model_parallel_size")
"""What its loader takes from a checkpoint as well, and a conversion may change."""

KEPT = (*KEPT_ARGS, *OF_THE_CONVERSION)

PARSER_OF_CORE = "0.17.1"
"""Whose args releases have that are published without one."""

SIZES = (
    "--num-layers 2 --hidden-size 8 --ffn-hidden-size 16 --num-attention-heads 2 "
    "--seq-length 8 --max-position-embeddings 16 --vocab-size 30 --make-vocab-size-divisible-by 8 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 1000 --save-interval 100 --eval-iters 0 "
    "--tokenizer-type NullTokenizer --use-cpu-initialization --transformer-impl local "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-rope-fusion --hidden-dropout 0 --attention-dropout 0"
)
"""Every command has these; the last are what takes a GPU."""

LLAMA = (
    "--position-embedding-type rope --rotary-base 500000 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)

MODELS = {
    "gpt": "",
    "untied": "--untie-embeddings-and-output-weights",
    "llama": LLAMA,
    "gqa": f"{LLAMA} --group-query-attention --num-query-groups 1 --add-qkv-bias",
    "scaled": f"{LLAMA} --use-rope-scaling --rope-scaling-factor 4",
    "no-position": f"{LLAMA} --no-position-embedding",
}


@dataclass(frozen=True)
class Frozen:
    """A checkpoint that is kept."""

    version: str
    model: str
    ckpt_format: str = "torch_dist"
    with_optimizer: bool = False

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.version}-{self.model}-{self.ckpt_format}"


FROZEN = [
    Frozen("0.19.2", "gqa", with_optimizer=True),
    Frozen("0.19.2", "gpt", "torch", with_optimizer=True),
    *(Frozen("0.19.2", model) for model in MODELS if model != "gqa"),
    Frozen("0.17.1", "llama"),
    Frozen("0.17.1", "gpt", "torch"),
    Frozen("0.16.1", "llama"),
    Frozen("0.15.3", "gpt"),
]


def words_of(model: str, ckpt_format: str = "torch_dist") -> list[str]:
    """A command line of Megatron-LM."""
    return [*SIZES.split(), *MODELS[model].split(), "--ckpt-format", ckpt_format]


def digest(tensor: Tensor) -> str:
    """Of the bytes of an fp32 tensor."""
    assert tensor.dtype == torch.float32
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def unpacked(frozen: Frozen, folder: Path) -> Path:
    """What --load is given."""
    with tarfile.open(GOLDEN / f"{frozen.name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "made"


def make(frozen: Frozen, folder: Path) -> dict[str, Any]:
    """Below folder/made; what the model is."""
    options = [*words_of(frozen.model, frozen.ckpt_format), "--save", "made"]
    options += [] if frozen.with_optimizer else ["--no-save-optim", "--no-save-rng"]
    out = str(folder / "out.pt")
    if frozen.version >= PARSER_OF_CORE:
        words = ["save", out, *options]
        megatron_package.run(frozen.version, TRAINING_PROGRAM, words, folder=folder)
        found: dict[str, Any] = torch.load(out)
        return found
    args = str(folder / "args.pkl")
    megatron_package.run(PARSER_OF_CORE, TRAINING_PROGRAM, ["parse", args, *options], folder=folder)
    torch.save(torch.zeros(1, 8, dtype=torch.int64), folder / "tokens.pt")
    words = ["save", args, "made", str(folder / "tokens.pt"), out]
    megatron_package.run(frozen.version, CORE_PROGRAM, words, folder=folder)
    return {"iteration": 100, "args": {}, "weights": torch.load(folder / "weights.pt")}


def main(names: list[str]) -> None:
    """All of them, or those that are named."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for frozen in FROZEN:
        if names and frozen.name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = make(frozen, Path(folder))
            with tarfile.open(GOLDEN / f"{frozen.name}.tar.xz", "w:xz") as archive:
                archive.add(Path(folder) / "made", "made", filter=nobody)
        told = json.loads(TOLD.read_text()) if TOLD.exists() else {}
        told[frozen.name] = {
            "iteration": found["iteration"],
            "weights": {name: digest(tensor) for name, tensor in found["weights"].items()},
            "args": {name: value for name, value in found["args"].items() if name in KEPT},
        }
        TOLD.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
        print(frozen.name, (GOLDEN / f"{frozen.name}.tar.xz").stat().st_size, flush=True)


def nobody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owner and time."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    main(sys.argv[1:])
