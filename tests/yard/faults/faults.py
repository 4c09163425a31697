"""Faults of real parts: a training to disturb, a server that dies, a store with keys."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flows.server.ephemeral import EphemeralServer
from tests.dev_store import dev_store
from tests.ports import free_port
from tests.yard.yard import HEADLINE, Yard
from trainyard.corpus.indexed import IndexedWriter

SECONDS = 90
REGION = "us-east-1"
PASSWORD = "tests:of-the-yard"
"""Of the servers that tests start again, and find by their URL alone."""
EVERYTHING = json.dumps(
    {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}],
    }
)

MODEL = "num_layers = 1\nhidden_size = 32\nnum_attention_heads = 2\nseq_length = 8\n"

TRAINING = """
num_layers = 1
hidden_size = 32
num_attention_heads = 2
seq_length = 32
hidden_dropout = 0.0
attention_dropout = 0.0
position_embedding_type = "rope"
micro_batch_size = 2
global_batch_size = 4
lr = 1e-3
eval_iters = 0
log_interval = 10
tokenizer_type = "NullTokenizer"
vocab_size = 255
split = "100,0,0"
num_threads = 1
data_path = ["{tokens}"]
save = "{save}"
train_iters = {iters}
save_interval = {save_interval}
"""


def write_tokens(prefix: Path) -> Path:
    """Token files of a few documents."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{prefix}.bin", "wb") as data, open(f"{prefix}.idx", "wb") as index:
        writer = IndexedWriter(data, np.uint16)
        for start in range(200):
            writer.add_document([((start + np.arange(300) * 3) % 250).astype(np.uint16)])
        writer.write_index(index)
    return prefix


def training(folder: Path, save: str, iters: int, save_interval: int = 20) -> str:
    """The document of a training that saves often; its path."""
    tokens = folder / "tokens" / "corpus"
    if not Path(f"{tokens}.idx").exists():
        write_tokens(tokens)
    path = folder / f"training-{iters}.toml"
    path.write_text(
        TRAINING.format(tokens=tokens, save=save, iters=iters, save_interval=save_interval)
    )
    return str(path)


def plan(folder: Path, output: str) -> str:
    """The document of a stage that takes a second; its path."""
    path = folder / "plan.toml"
    path.write_text(f'{MODEL}vocab_size = 300\noutput_dir = "{output}"\n')
    return str(path)


def steps(save: str | Path) -> list[int]:
    """The published steps of a local run folder."""
    found = Path(save).glob("iter_*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("iter_")) for path in found)


def logs(folder: Path) -> str:
    """What all stages of a yard wrote."""
    return "".join(path.read_text() for path in folder.rglob("log.txt"))


def wait_for(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until a condition holds; AssertionError when the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


@dataclass
class Ended:
    """A flow that has ended."""

    status: int
    output: str
    seconds: float

    def states(self, job: str) -> list[str]:
        """What became of a job, attempt after attempt."""
        return [state for name, state, _ in HEADLINE.findall(self.output) if name == job]


@dataclass
class Flow:
    """A flow that runs one stage from a document, and its output."""

    process: subprocess.Popen[str]
    began: float

    def ends(self, seconds: float = SECONDS) -> Ended:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=seconds)
        return Ended(self.process.returncode, out + err, time.monotonic() - self.began)

    def kill(self) -> None:
        """End it as a machine would that loses power."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def start_stage(yard: Yard, stage: str, document: str) -> Flow:
    """Start flow run_stage."""
    process = yard.start("-m", "flows.run_stage", stage, "--config", document)
    return Flow(process, time.monotonic())


def in_one_attempt(yard: Yard, folder: Path, document: str) -> Flow:
    """Start a training that is not tried again after an attempt without a step."""
    profile = folder / "hasty.toml"
    profile.write_text('block = "process"\nfruitless_attempts = 1\n')
    given = ("pretrain", "--config", document, "--profile", str(profile))
    return Flow(yard.start("-m", "flows.run_stage", *given), time.monotonic())


def in_training(yard: Yard, save: Path, iters: int) -> Flow:
    """Start a training of so many steps, and wait until the first of them are saved."""
    flow = start_stage(yard, "pretrain", training(yard.folder, str(save), iters))
    wait_for(lambda: steps(save))
    return flow


@contextmanager
def closed_store(folder: Path) -> Iterator[dict[str, str]]:
    """A moto server that checks signatures; the environment that opens it."""
    from botocore.session import Session

    def client(service: str) -> Any:
        keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        return Session().create_client(service, REGION, endpoint_url=url, **keys)

    # What comes first is not checked: the user and the bucket are made.
    with (
        (folder / "store.txt").open("w") as output,
        dev_store(output, INITIAL_NO_AUTH_ACTION_COUNT="4") as url,
    ):
        users = client("iam")
        users.create_user(UserName="yard")
        policy = {"UserName": "yard", "PolicyName": "all", "PolicyDocument": EVERYTHING}
        users.put_user_policy(**policy)
        key = users.create_access_key(UserName="yard")["AccessKey"]
        client("s3").create_bucket(Bucket="yard-tests")
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        }


def answers(port: int) -> bool:
    """True when somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """A Prefect server that can be killed and started again, at the same address."""

    def __init__(self, home: Path) -> None:
        self._port = free_port()
        self._home = home
        self._api: EphemeralServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/api"

    @property
    def environment(self) -> dict[str, str]:
        """What leads a program to it."""
        return {"PREFECT_API_URL": self.url, "PREFECT_API_AUTH_STRING": PASSWORD}

    def start(self) -> None:
        self._api = EphemeralServer(self._home, self._port, PASSWORD)
        self._api.wait()

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self._api is not None:
            self._api._process.kill()
            self._api.stop()
            self._api = None
