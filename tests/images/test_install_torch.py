"""torch comes from a file whose hash is known, in `make install` and in images."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from images import lock as locking

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "images" / "install-torch"
LOCKS = ROOT / "images" / "locks" / "torch"
HASH = re.compile("--hash=sha256:([0-9a-f]{64})")
OTHER = "0" * 64


def install(*pip: str, locks: Path = LOCKS, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null", **variables}
    command = [str(PROGRAM), str(locks), *pip]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


STUB = """
for argument; do
  if [ "$argument" = --report ]; then echo "$REPORT"; exit $STATUS; fi
done
cat
echo "$@"
"""


def report(sha256: str) -> str:
    """A report of pip, as far as it matters."""
    return f'{{"install": [\n {{"hashes": {{\n "sha256": "{sha256}"\n }}}}]}}'


def asked(given: str = report(OTHER), status: int = 0, **variables: str) -> list[str]:
    """What pip is given at last: its requirement, then its options; empty if it is refused."""
    more = {"REPORT": given, "STATUS": str(status), **variables}
    return install("sh", "-c", STUB, "pip", "install", **more).stdout.splitlines()


# --- what pip is asked for --------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.stem)
def test_a_file_of_the_locks_is_taken_by_its_hash(path: Path) -> None:
    (pin,) = [x for x in locking.CONSTRAINTS.read_text().splitlines() if x.startswith("torch==")]
    for known in HASH.findall(path.read_text())[:2]:
        assert asked(report(known)) == [f"{pin} --hash=sha256:{known}", "install -r /dev/stdin"]


def test_any_other_file_is_refused_and_a_failure_of_pip_is_one() -> None:
    known = HASH.findall((LOCKS / "cpu.txt").read_text())[0]
    assert asked(report(known)) != []
    assert asked(report(OTHER)) == []
    assert asked(report("")) == []
    assert asked("no JSON") == []
    assert asked(report(known), status=1) == []


def test_a_torch_that_is_there_stays() -> None:
    assert asked('{"install": []}') == []
    done = install("sh", "-c", STUB, "pip", REPORT='{"install": []}', STATUS="0")
    assert (done.returncode, done.stderr) == (0, "")


def test_every_index_that_make_names_has_a_lock_of_the_pinned_version() -> None:
    named = re.findall(r'https://download[^\s"]+', (ROOT / "Makefile").read_text())
    assert set(named) == set(locking.TORCH_INDEXES.values()) - {""}
    (pin,) = [x for x in locking.CONSTRAINTS.read_text().splitlines() if x.startswith("torch==")]
    for name, index in locking.TORCH_INDEXES.items():
        text = (LOCKS / f"{name}.txt").read_text()
        assert index in text
        assert re.search(rf"^{pin}(\+{name})? ", text, re.MULTILINE), name
        assert len(HASH.findall(text)) >= 4, name


def test_a_hash_of_ones_own_is_the_only_one_and_any_means_none() -> None:
    assert HASH.findall(asked(TORCH_SHA256=OTHER)[0]) == [OTHER]
    assert "hash" not in asked(TORCH_SHA256="any")[0]


def test_an_index_of_ones_own_is_checked_too() -> None:
    index = "https://download.pytorch.org/whl/cpu"
    assert asked(TORCH_INDEX=index) == []
    known = HASH.findall((LOCKS / "cpu.txt").read_text())[0]
    requirement, options = asked(report(known), TORCH_INDEX=index)
    assert known in requirement
    assert f"--index-url {index} -r" in options


@pytest.mark.parametrize("given", ["latest", "sha256:" + OTHER, "$(id)", "A" * 64])
def test_what_is_no_hash_is_refused(given: str) -> None:
    done = install("false", TORCH_SHA256=given)
    assert done.returncode == 2
    assert "is not 64 hexadecimal digits, or any" in done.stderr


def make(*given: str) -> str:
    """The commands of `make install`, none of which runs."""
    command = ["make", "-n", "-B", "--no-print-directory", "install", "PYTHON=true", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", "")


def test_make_installs_nothing_without_hashes_unless_told_to() -> None:
    lines = [x for x in make().splitlines() if "pip" in x and " install " in x]
    checked = [x for x in lines if "--require-hashes" in x or "images/install-torch" in x]
    assert len(checked) == len(lines) - 1 == 4
    (own,) = set(lines) - set(checked)
    assert own.endswith("--no-deps --editable .")
    assert 'TORCH_INDEX="" TORCH_SHA256=""' in make()
    assert "--constraint images/locks/cuda/install.txt" in make()


def test_make_takes_the_libraries_of_another_build_by_version() -> None:
    text = make(f"TORCH_SHA256={OTHER}", "TORCH_INDEX=https://a.example/whl")
    assert f'TORCH_INDEX="https://a.example/whl" TORCH_SHA256="{OTHER}"' in text
    assert "cuda/install.txt" not in text
    assert '"$(grep ^torch== constraints.txt)"' in text
    assert "--constraint constraints.txt" in text


# --- with a real pip --------------------------------------------------------------------------


def write_wheel(folder: Path) -> str:
    """A wheel named as that of torch; returns its hash."""
    info = "torch-1.0.dist-info"
    wheel = folder / "torch-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def pip(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    return [*command, "--find-links", str(folder), "--target", f"{folder}/t"]


CASES = [
    ("right", {}, None),
    ("wrong", {}, "the index has a file that {locks} does not know, with the sha256 {right};"),
    ("wrong", {"TORCH_SHA256": "{right}"}, None),
    ("wrong", {"TORCH_SHA256": "any"}, None),
    ("right", {"TORCH_SHA256": OTHER}, "DO NOT MATCH THE HASHES"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("known", "given", "refusal"), CASES)
def test_pip_takes_a_known_file_alone_and_one_sentence_says_what_to_do(
    known: str, given: dict[str, str], refusal: str | None, tmp_path: Path
) -> None:
    right = write_wheel(tmp_path)
    locks = tmp_path / "locks"
    locks.mkdir()
    listed = right if known == "right" else OTHER
    (locks / "usual.txt").write_text(f"# ours\ntorch==1.0 \\\n    --hash=sha256:{listed}\n")
    variables = {name: value.format(right=right) for name, value in given.items()}
    done = install(*pip(tmp_path), locks=locks, **variables)
    assert (done.returncode == 0) == (refusal is None), done.stderr
    assert (tmp_path / "t/torch.py").exists() == (refusal is None)
    if refusal is not None:
        assert refusal.format(locks=locks, right=right) in done.stderr
        assert "TORCH_SHA256" in given or done.stderr.count("\n") == 1


@pytest.mark.slow
def test_another_error_of_pip_is_shown_as_it_is(tmp_path: Path) -> None:
    done = install(*pip(tmp_path))
    assert done.returncode == 1
    assert "No matching distribution found for torch==" in done.stderr


@pytest.mark.slow
def test_an_image_prefers_a_wheel_in_its_folder_and_checks_it_too(tmp_path: Path) -> None:
    text = (ROOT / "images/cpu.Dockerfile").read_text()
    layer = text[text.index("FROM base AS torch\n") :]
    run = layer[layer.index("    set -- pip") : layer.index("\n\n# ---")].replace("\\\n", "")
    run = run.replace("/wheels", str(tmp_path)).replace("/install-torch /locks", "$INSTALL")
    (tmp_path / "pip").write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -m pip "$@"\n')
    (tmp_path / "pip").chmod(0o755)
    right = write_wheel(tmp_path)
    (tmp_path / "usual.txt").write_text(f"torch==1.0 \\\n    --hash=sha256:{OTHER}\n")
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_TARGET": f"{tmp_path}/t",
        "INSTALL": f"{PROGRAM} {tmp_path}",
        "TORCH_INDEX": "https://no.example/whl",
    }
    for sha256, is_taken in (("", False), (right, True)):
        done = subprocess.run(
            ["sh", "-e", "-c", run],
            env={**environment, "TORCH_SHA256": sha256},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) == is_taken, done.stderr
        assert (tmp_path / "t/torch.py").exists() == is_taken
