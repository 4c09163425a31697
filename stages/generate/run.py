"""Generates batch by batch, and joins what all ranks made."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stages.generate.config import GenerateConfig
from stages.runtime.context import StageRun
from trainyard.artifacts import store
from trainyard.errors import ConfigError, DataError
from trainyard.inference.beam import beam_search
from trainyard.inference.decoders import Decoder
from trainyard.inference.kv_cache import kv_dtype_of
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.neighbors import NeighborDecoder
from trainyard.inference.on_ranks import model_on_ranks
from trainyard.inference.padded import PaddedDecoder
from trainyard.inference.prompts import Prompt, chat_tokens, prompt_tokens, read_prompts
from trainyard.inference.request import Completion
from trainyard.inference.static import run_requests
from trainyard.inference.texts import TextRequests, build_decoder
from trainyard.logging import printable
from trainyard.models.retro.model import RetroModel
from trainyard.parallel.groups import (
    ProcessGroups,
    broadcast_object,
    gather_objects,
)

log = logging.getLogger(__name__)

FILE = "generations.jsonl"

Row = dict[str, Any]
"""A line of the output."""


def run(config: GenerateConfig, stage: StageRun) -> dict[str, Any]:
    """Generate, and write generations.jsonl or print."""
    prompts = prompts_of(config)
    with model_on_ranks(config) as generator:
        groups = generator.groups
        work = BatchWork(config, generator, prompts)
        work.check_prompts()
        done = broadcast_object(sorted(finished(stage, len(work))), groups.world)
        rows = generate_all(work, stage, groups, set(done))
        if stage.output is None:
            shared = gather_objects(rows, groups.world)
            if groups.rank == 0:
                show(dict(sorted((i, r) for part in shared for i, r in part.items())))
        else:
            gather_objects(None, groups.world)  # until the last rank has finished its batches
        metrics = {"prompts": len(prompts)}
        if groups.rank == 0 and stage.output is not None:
            metrics["output_tokens"] = join_batches(stage, len(work))
    return metrics


def prompts_of(config: GenerateConfig) -> list[Prompt]:
    """What each text continues. DataError for fewer prompts than --num-samples."""
    if not config.has_prompts:
        return [Prompt("", f"text {number}") for number in range(config.num_samples or 0)]
    found = read_prompts(
        config.prompts, config.prompt_file, config.prompt_key, config.prompt_format
    )
    if config.num_samples is not None and config.num_samples > len(found):
        raise DataError(
            f"--num-samples {config.num_samples}: there are {len(found)} prompts; lower it, or "
            "give --samples-per-prompt for several texts of each"
        )
    first = found[: config.num_samples]
    return [prompt for prompt in first for _ in range(config.samples_per_prompt or 1)]


class BatchWork:
    """The prompts of a run in batches, and what each batch becomes."""

    def __init__(
        self, config: GenerateConfig, generator: ModelOnRanks, prompts: Sequence[Prompt]
    ) -> None:
        self.config, self.generator, self.prompts = config, generator, prompts
        self._compiled: Decoder | None = None
        self._longest = 0
        """Tokens of a prompt without neighbours, once they are checked."""
        self.requests = TextRequests(
            generator,
            config.sampling,
            config.generation,
            config.num_tokens_to_generate,
            ignore_end=config.ignore_eod,
        )
        with_neighbors = [prompt for prompt in prompts if prompt.neighbors is not None]
        if with_neighbors and not isinstance(generator.model, RetroModel):
            raise ConfigError(
                f"{with_neighbors[0].name} has neighbors, and --load {config.load} holds a "
                f"{generator.config.model_type}; they are for a retro"
            )
        if with_neighbors and config.layout.pipeline_model_parallel_size > 1:
            raise ConfigError(
                "neighbors of prompts are not for --pipeline-model-parallel-size above 1; leave it "
                "out"
            )

    @property
    def _kv_dtype(self) -> torch.dtype | None:
        return kv_dtype_of(self.config.kv_cache_dtype)

    def __len__(self) -> int:
        return -(-len(self.prompts) // self.config.inference_max_requests)

    def tokens(self, prompt: Prompt) -> list[int]:
        """Of a prompt."""
        tokenizer = self.generator.tokenizer
        if self.config.chat:
            return chat_tokens(tokenizer, prompt.text)
        return prompt_tokens(tokenizer, prompt.text, add_bos=self.config.generation.add_bos)

    def check_prompts(self) -> None:
        """Refuse a prompt that is too long, before any work is done."""
        for number, prompt in enumerate(self.prompts):
            request = self.requests.make(self.tokens(prompt), number, prompt.name)
            if prompt.neighbors is None:
                self._longest = max(self._longest, len(request.prompt))

    def rows(self, batch: int) -> list[Row]:
        """The lines of a batch."""
        size = self.config.inference_max_requests
        numbers = range(batch * size, min((batch + 1) * size, len(self.prompts)))
        if self.config.generation.beam_width:
            return [self._searched(number) for number in numbers]
        alone = [n for n in numbers if self.prompts[n].neighbors is not None]
        together = [n for n in numbers if self.prompts[n].neighbors is None]
        made = {n: self._with_neighbors(n) for n in alone}
        made |= dict(zip(together, self._together(together), strict=True))
        return [self._row(n, made[n]) for n in numbers]

    def _together(self, numbers: Sequence[int]) -> list[Completion]:
        if not numbers:
            return []
        requests = [
            self.requests.make(self.tokens(self.prompts[n]), n, self.prompts[n].name)
            for n in numbers
        ]
        decoder = self._decoder([len(request.prompt) for request in requests])
        return run_requests(decoder, requests).completions

    def _decoder(self, lengths: Sequence[int]) -> Decoder:
        """For a batch of prompts of these lengths. A compiled one is made once, with room for all
        prompts, since each shape is compiled anew."""
        count = self.config.num_tokens_to_generate
        if self.config.cuda_graph_impl != "local":
            return build_decoder(
                *(self.generator, len(lengths), max(lengths), count), kv_dtype=self._kv_dtype
            )
        size = min(self.config.inference_max_requests, len(self.prompts))
        if self._compiled is None:
            self._compiled = build_decoder(
                *(self.generator, size, self._longest, count),
                compiled=True,
                kv_dtype=self._kv_dtype,
            )
        return PaddedDecoder(self._compiled, size)

    def _with_neighbors(self, number: int) -> Completion:
        prompt, generator = self.prompts[number], self.generator
        assert prompt.neighbors is not None
        encode, size = generator.tokenizer.encode, generator.tokenizer.vocab_size
        chunks = [[encode(text) for text in chunk] for chunk in prompt.neighbors]
        decoder = NeighborDecoder(generator.model, chunks, size)
        request = self.requests.make(self.tokens(prompt), number, prompt.name)
        return run_requests(decoder, [request]).completions[0]

    def _searched(self, number: int) -> Row:
        """By beam search."""
        generation, generator = self.config.generation, self.generator
        tokens, width = self.tokens(self.prompts[number]), generation.beam_width
        count = self.config.num_tokens_to_generate
        (end,) = self.requests.stop_ids
        texts = beam_search(
            build_decoder(generator, width, len(tokens), count, kv_dtype=self._kv_dtype),
            tokens,
            count,
            width=width,
            length_penalty=generation.length_penalty,
            end=end,
        )
        decode = generator.tokenizer.decode
        beams = [
            {"score": text.score, "text": decode([t for t in text.tokens if t != end])}
            for text in texts
        ]
        best = texts[0].tokens
        row = self._head(number, tokens) | {
            "generated_text": beams[0]["text"],
            "finish_reason": "stop" if best[-1] == end else "length",
            "generated_tokens": best,
        }
        return row | {"beams": beams}

    def _row(self, number: int, completion: Completion) -> Row:
        row = self._head(number, completion.request.prompt) | {
            "generated_text": self.requests.text(completion),
            "finish_reason": completion.finish_reason,
            "generated_tokens": completion.tokens,
        }
        return row | self.requests.scores(completion)

    def _head(self, number: int, tokens: Sequence[int]) -> Row:
        return {
            "id": number,
            "prompt": self.prompts[number].text,
            "prompt_tokens": list(tokens),
        }


# --- batches over ranks -----------------------------------------------------------------------


def finished(stage: StageRun, count: int) -> Iterator[int]:
    """The batches that a killed run finished."""
    if stage.output is None:
        return
    work = stage.work
    yield from (batch for batch in range(count) if work.published(key_of(batch)) is not None)


def key_of(batch: int) -> str:
    """Name of a batch in the work folder."""
    return f"batch-{batch:08d}"


def generate_all(
    work: BatchWork, stage: StageRun, groups: ProcessGroups, done: set[int]
) -> dict[int, list[Row]]:
    """Make this replica's share of the batches that are not done; its rows, unless they are
    written."""
    todo = [batch for batch in range(len(work)) if batch not in done]
    if done and groups.rank == 0:
        log.info("resuming: batches_done=%d batches=%d", len(done), len(work))
    writes = groups.tp_rank == 0 and groups.pp_rank == 0
    made: dict[int, list[Row]] = {}
    with stage.progress(len(work), "batches", "generate", start=len(done)) as progress:
        for batch in todo[groups.dp_rank :: groups.dims.dp]:
            rows = work.rows(batch)
            if writes and stage.output is None:
                made[batch] = rows
            elif writes:
                write_batch(stage, batch, rows)
            progress.update(groups.dims.dp)
    return made


def write_batch(stage: StageRun, batch: int, rows: Sequence[Row]) -> None:
    """Keep the lines of a finished batch in the work folder."""
    stage.check_claim()
    with stage.work.open(f"{key_of(batch)}.jsonl") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    tokens = sum(len(row["generated_tokens"]) for row in rows)
    stage.work.publish(key_of(batch), {"tokens": tokens})


def join_batches(stage: StageRun, count: int) -> int:
    """Write generations.jsonl; returns the number of generated tokens."""
    work, tokens = stage.work, 0
    with stage.open(FILE) as out:
        for batch in range(count):
            out.write(store.read_bytes(work.url(f"{key_of(batch)}.jsonl")))
            # Other ranks have published since this one listed the units.
            tokens += store.read_json(work.url(f"{key_of(batch)}.unit.json"))["tokens"]
    return tokens


def show(batches: dict[int, list[Row]]) -> None:
    """Print every prompt with its text, and its scores if there are any."""
    for row in (row for rows in batches.values() for row in rows):
        print(f"\n------------- RESULT FOR PROMPT {row['id']} ---------------")
        print(printable(f"{row['prompt']}{row['generated_text']}"))
        for name in ("log_probs", "beams"):
            if name in row:
                print(printable(f"{name}: {json.dumps(row[name], ensure_ascii=False)}"))
