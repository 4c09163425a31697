"""Files of `torch.save` are read as torch reads them, and hostile ones refused."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainyard.conversion.torch_save.test_pickles import Payload
from trainyard.artifacts import store
from trainyard.conversion.torch_save.file import TorchFile, tensor_refs
from trainyard.conversion.torch_save.pickles import TensorRef
from trainyard.conversion.torch_save.write import LazyTensor, write_torch_file
from trainyard.errors import ArtifactError


def tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(60, generator=generator)
    half = torch.randn(5, 7, generator=generator).to(torch.bfloat16)
    marked = torch.randn(2, 3, generator=generator)
    marked.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron-LM does
    return {
        "plain": torch.randn(3, 4, generator=generator),
        "view": base[10:40].view(5, 6),
        "turned": base[10:40].view(5, 6).t(),
        "half": half,
        "again": half,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "numbers": torch.arange(9),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "marked": marked,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


@pytest.mark.parametrize("new_zip", [True, False], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("place", ["{}", "memory://{}"])
def test_every_tensor_is_read_as_torch_reads_it(tmp_path: Path, new_zip: bool, place: str) -> None:
    path = tmp_path / "x.pt"
    torch.save({"nested": [tensors()]}, path, _use_new_zipfile_serialization=new_zip)
    url = place.format(path)
    if url != str(path):
        store.write_bytes(url, path.read_bytes())
    with TorchFile(url) as file:
        found = file.tree["nested"][0]
        for name, tensor in tensors().items():
            read = file.read(found[name])
            assert torch.equal(read, tensor.detach()), name
            assert read.dtype == tensor.dtype
            assert read.is_contiguous()
        assert found["half"].key == found["again"].key


def written(tree: Any) -> bytes:
    out = io.BytesIO()
    write_torch_file(out, tree, "archive")
    return out.getvalue()


def test_what_is_written_torch_loads(tmp_path: Path) -> None:
    values = {name: t.detach() for name, t in tensors().items()}
    tree = {
        "model": {name: LazyTensor.of(tensor) for name, tensor in values.items()},
        "args": Namespace(lr=1.0, dtype=torch.bfloat16),
        "list": [1, (2, "three"), None],
    }
    path = tmp_path / "x.pt"
    path.write_bytes(written(tree))
    for options in ({"mmap": True}, {"mmap": False}):
        with torch.serialization.safe_globals([Namespace]):
            loaded = torch.load(path, weights_only=True, **options)
        for name, tensor in values.items():
            assert torch.equal(loaded["model"][name], tensor), name
        assert (loaded["args"], loaded["list"]) == (tree["args"], tree["list"])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with TorchFile(str(path)) as file:
        begins = [file._span_of_storage(ref).begin for ref in tensor_refs(file.tree)]
        assert all(begin % 64 == 0 for begin in begins)
        assert torch.equal(file.read(file.tree["model"]["turned"]), values["turned"])
    assert written(tree) == path.read_bytes()


# --- hostile ----------------------------------------------------------------------------------


@pytest.mark.parametrize("new_zip", [True, False], ids=["zip", "before 1.6"])
def test_a_payload_is_refused_and_not_run(tmp_path: Path, new_zip: bool) -> None:
    path, witness = tmp_path / "x.pt", tmp_path / "ran"
    tree = {"model": {"w": torch.ones(3)}, "rng": Payload(os.system, f"touch {witness}")}
    torch.save(tree, path, _use_new_zipfile_serialization=new_zip)
    with pytest.raises(ArtifactError, match=r"x\.pt: .*posix\.system"):
        TorchFile(str(path))
    assert not witness.exists()
    torch.load(path, weights_only=False)
    assert witness.exists()


def rezip(
    data: bytes,
    contents: dict[str, bytes] | None = None,
    renamed: str = "",
    added: tuple[str, ...] = (),
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """An archive again: other contents by the end of a name, data/0 renamed, records added."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            changed = [c for end, c in (contents or {}).items() if name.endswith(end)]
            record = changed[0] if changed else old.read(name)
            new.writestr(renamed if renamed and name.endswith("data/0") else name, record)
        for name in added:
            new.writestr(name, b"")
    return out.getvalue()


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"contents": {"data/0": bytes(10_000_000)}, "compression": zipfile.ZIP_DEFLATED},
            "is compressed",
        ),
        ({"renamed": "../../etc/passwd"}, "leads out of the archive"),
        ({"renamed": "/etc/passwd"}, "leads out of the archive"),
        ({"renamed": "archive\\..\\data"}, "leads out of the archive"),
        ({"renamed": "archive/data/7"}, "no record"),
        ({"renamed": "archive/data.pkl"}, "2 data.pkl"),
        ({"contents": {"data/0": bytes(8)}}, "needs 12 bytes of 'data/0', which has 8"),
        ({"contents": {"byteorder": b"big"}}, "big-endian"),
        ({"added": ("archive/code/__torch__.py",)}, "TorchScript"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_archive_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    sound = written({"w": LazyTensor.of(torch.ones(3))})
    path = tmp_path / "x.pt"
    path.write_bytes(rezip(sound))
    with TorchFile(str(path)) as file:
        assert torch.equal(file.read(file.tree["w"]), torch.ones(3))
    path.write_bytes(rezip(sound, **changes))
    with pytest.raises(ArtifactError, match=words), TorchFile(str(path)) as file:
        file.read(file.tree["w"])


def test_records_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """One small range of a file as the contents of many records: a bomb that needs no packing."""
    data = bytearray(
        written({"w": LazyTensor.of(torch.ones(3)), "v": LazyTensor.of(torch.ones(3))})
    )
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        first = archive.getinfo("archive/data/0").header_offset
        second = archive.getinfo("archive/data/1").header_offset
    at = data.rindex(b"archive/data/1") - 46  # its entry in the directory
    assert struct.unpack_from("<L", data, at + 42)[0] == second
    struct.pack_into("<L", data, at + 42, first + 10)
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"overlaps|not a sound zip"):
        TorchFile(str(path))


@pytest.mark.parametrize(
    ("offset", "shape", "stride"),
    [(0, [4], [1]), (1, [3], [1]), (0, [2, 2], [2, 1]), (0, [2], [2**40])],
)
def test_a_tensor_that_reaches_past_its_storage_is_refused(
    tmp_path: Path, offset: int, shape: list[int], stride: list[int]
) -> None:
    class Reaching(LazyTensor):
        def __reduce__(self) -> Any:
            function, (storage, *_, grad, hooks) = super().__reduce__()
            return function, (storage, offset, tuple(shape), tuple(stride), grad, hooks)

    lazy = LazyTensor.of(torch.ones(3))
    path = tmp_path / "x.pt"
    path.write_bytes(written({"w": Reaching(lazy.spec, lazy.make)}))
    with pytest.raises(ArtifactError, match="reaches past its storage"):
        TorchFile(str(path))


@pytest.mark.parametrize("new_zip", [True, False], ids=["zip", "before 1.6"])
def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path, new_zip: bool) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(300)}, path, _use_new_zipfile_serialization=new_zip)
    whole = path.read_bytes()
    for length in (0, 3, 50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match=r"x\.pt"), TorchFile(str(path)) as file:
            file.read(file.tree["w"])


def test_an_old_file_with_wrong_sizes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    data = bytearray(path.read_bytes())
    struct.pack_into("<q", data, len(data) - 20, 2**40)
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="1099511627776 elements"):
        TorchFile(str(path))


def test_a_file_that_is_not_of_torch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for data in (pickle.dumps({"a": 1}, 4), b"version https://git-lfs"):
        path.write_bytes(data)
        with pytest.raises(ArtifactError, match=r"not a file of torch\.save"):
            TorchFile(str(path))


def test_a_directory_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    data = bytearray(written({"w": LazyTensor.of(torch.ones(3))}))
    struct.pack_into("<L", data, data.rindex(b"PK\5\6") + 12, 2**31)
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="directory of 2147483648 bytes"):
        TorchFile(str(path))


def test_a_reference_knows_its_part_of_a_vector() -> None:
    vector = TensorRef("0", "float32", 400, 10, (90,), (1,))
    part = vector.flat_part(6, (2, 3))
    assert (part.offset, part.shape, part.stride, part.numel) == (16, (2, 3), (3, 1), 6)
