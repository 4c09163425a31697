# Prints the tensors of a checkpoint, with safetensors and json alone.
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open


def find_step(folder: Path) -> Path:
    """A step folder itself, or the latest finished step of a run."""
    folders = [folder] if (folder / "index.json").exists() else folder.glob("iter_*")
    found = [p / "manifest.json" for p in folders if (p / "manifest.json").exists()]
    whole = [p.parent for p in found if json.loads(p.read_text())["status"] == "complete"]
    assert whole, f"{folder}: no manifest.json, so no save that was finished"
    return max(whole, key=lambda p: (len(p.name), p.name))


def read_tensor(step: Path, entry: dict) -> torch.Tensor:
    """One tensor, put together from its pieces."""
    whole = None
    for piece in entry["pieces"]:
        with safe_open(step / piece["file"], framework="pt") as file:
            part = file.get_tensor(piece["key"])
        if whole is None:
            whole = torch.empty(entry["shape"], dtype=part.dtype)
        ranges = zip(piece["offset"], piece["shape"], strict=True)
        whole[tuple(slice(begin, begin + extent) for begin, extent in ranges)] = part
    return whole


def read_checkpoint(folder: str, prefix: str = "model.") -> dict[str, torch.Tensor]:
    step = find_step(Path(folder))
    index = json.loads((step / "index.json").read_text())
    assert index["format_version"] == 1
    return {n: read_tensor(step, e) for n, e in index["tensors"].items() if n.startswith(prefix)}


for name, tensor in read_checkpoint(sys.argv[1]).items():
    print(name, tuple(tensor.shape), tensor.dtype)
