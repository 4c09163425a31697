"""Bodies of POST /v1/retro/completions that others wrote: each is refused in a sentence, soon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.trainyard.models.retro.small_retro import build
from tests.trainyard.serving.running import Running, loaded_of, running
from tests.trainyard.serving.test_retro_api import PATH, PROMPT, Letters

pytestmark = pytest.mark.slow

KEY = "0123456789abcdef0123"
JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}


class Counting(Letters):
    """Refuses what is no Unicode, and counts the texts."""

    texts = 0

    def encode(self, text: str) -> list[int]:
        self.texts += 1
        text.encode()
        return super().encode(text)


@pytest.fixture(scope="module")
def tokenizer() -> Counting:
    return Counting()


@pytest.fixture(scope="module")
def retro(tokenizer: Any) -> Iterator[Running]:
    loaded = replace(loaded_of(build(seq_length=48)), tokenizer=tokenizer)
    with running(loaded, key=KEY) as found:
        yield found


def body(**fields: Any) -> bytes:
    """A request with other fields."""
    return json.dumps({"prompt": PROMPT, "neighbors": [["a"]]} | fields).encode()


BODIES: dict[str, tuple[bytes, str]] = {
    "a chunk for each byte": (body(neighbors=[["a"]] * 200_000), "neighbours of 200000 chunks"),
    "chunks without any": (body(neighbors=[[]] * 500_000), "neighbours of 500000 chunks"),
    "a neighbour for each byte": (body(neighbors=[["a"] * 200_000]), "200000 neighbours of a"),
    "a prompt of no chunk": (body(prompt=""), "has 0 whole chunks of 4"),
    "a long prompt": (body(prompt="a" * 3_000_000), "and the model takes 48 together"),
    "half a character": (body(neighbors=[["\ud800"]]), "half of a surrogate pair"),
    "half a character before": (body(prompt="\udfff"), "half of a surrogate pair"),
    "no tokens": (body(neighbors=[[[]]]), "neighbors.0.0: "),
    "tokens below zero": (body(neighbors=[[[-1]]]), "neighbors.0.0.0: "),
    "tokens beyond 64 bits": (body(neighbors=[[[2**64]]]), "neighbors.0.0.0: "),
    "tokens that are flags": (body(neighbors=[[[True]]]), "neighbors.0.0: "),
    "fractions of tokens": (body(neighbors=[[[1.5]]]), "neighbors.0.0: "),
    "texts in place of lists": (body(neighbors=["abc"]), "neighbors.0: "),
    "a table": (body(neighbors={"a": 1}), "neighbors: "),
    "deep lists": (b'{"prompt": "abcdefgh", "neighbors": ' + b"[" * 9000, "no JSON document"),
    "no number": (body(temperature=float("nan")), "temperature: "),
    "nearly no temperature": (body(temperature=1e-300), "temperature must be 0"),
    "a seed of digits": (body(seed=10**300), "seed: "),
    "no tokens to make": (body(max_tokens=0), "max_tokens: "),
    "all tokens to make": (body(max_tokens=2**31 - 1), "the model takes 48 together"),
    "a file": (body(neighbors_file="/etc/passwd"), "neighbors_file: "),
    "another model": (body(model="../../etc/passwd"), "is not served here"),
    "more than a body": (body(neighbors=[["a" * 5_000_000]]), "at most 4194304 bytes"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_hostile_body_is_a_bad_request(kind: str, retro: Running, tokenizer: Counting) -> None:
    data, words = BODIES[kind]
    before = tokenizer.texts
    reply = retro.client.request("POST", PATH, content=data, headers=JSON)
    assert reply.status_code in (400, 404, 413)
    assert words in reply.json()["error"]["message"]
    assert len(reply.text) < 2000
    assert tokenizer.texts - before <= 2  # the prompt, and the neighbour that is refused
    assert retro.client.get("/health").status_code == 200


def test_strangers_get_no_answer(retro: Running) -> None:
    for headers, status in (
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": ""}, 401),
        ({"Content-Type": "text/plain"}, 415),
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 421),
    ):
        reply = retro.client.request("POST", PATH, content=body(), headers=JSON | headers)
        assert reply.status_code == status, headers
    assert retro.client.request("POST", PATH, content=body(), headers=JSON).status_code == 200
