"""Loads the model and runs it: the child of the process that listens, and the ranks beside it.

    python -m stages.serve.engine DESCRIPTOR PARENT

is what `EngineProcess` starts, with its end of a connection and its own process."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from base64 import b64encode
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from stages.runtime.context import STOPPING, StageRun
from stages.runtime.parent_watch import die_with
from stages.runtime.process_exit import exit_now
from stages.serve.config import ServeConfig
from trainyard import logging as our_logging
from trainyard.artifacts import retry
from trainyard.config import flag, from_dict
from trainyard.errors import ConfigError, TrainyardError
from trainyard.inference.dynamic.build import build_engine, check_family
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.dynamic.ranks import Follower
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.on_ranks import model_on_ranks
from trainyard.serving.batch_engine import BatchEngine, BatchFollower
from trainyard.serving.engine_calls import calls_of
from trainyard.serving.engine_side import EngineSide
from trainyard.serving.wire import Channel, ConnectionLost, encoded_error, encoded_stats

log = logging.getLogger(__name__)


def main() -> int:
    """Run the engine until its parent closes the connection; returns the exit status."""
    die_with(int(sys.argv[2]))
    for number in STOPPING:  # the parent gets them too, and says when to end
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    document = channel.receive_one()
    our_logging.configure(document["log_level"])
    retry.take_over((document["waits"], frozenset(document["known_stores"])))
    config = from_dict(ServeConfig, document["config"])
    try:
        with model_on_ranks(config) as generator:
            _serve(config, generator, channel)
    except ConnectionLost:
        return 0
    except Exception as error:
        if not isinstance(error, TrainyardError):
            log.exception("the engine could not begin")
        with suppress(ConnectionLost):  # an engine that failed in a step has said so
            channel.send({"failure": encoded_error(error)})
        return getattr(error, "exit_status", TrainyardError.exit_status)
    return 0


def _serve(config: ServeConfig, generator: ModelOnRanks, channel: Channel) -> None:
    engine = build(config, generator)
    assert isinstance(engine, BatchEngine | DynamicEngine), "this is the first rank"
    channel.send(described(generator, engine))
    EngineSide(engine, channel, generator.tokenizer, calls_of(generator)).run()
    engine.close()
    channel.close()


def described(generator: ModelOnRanks, engine: BatchEngine | DynamicEngine) -> dict[str, Any]:
    """What the process that listens needs to know of the model: the fields of `Loaded`."""
    files, config = generator.tokenizer.files(), generator.config
    is_retro = config.model_type == "retro"
    return {
        "tokenizer": {name: b64encode(data).decode() for name, data in files.items()},
        "end_token": generator.end_token,
        "max_tokens": engine.max_tokens,
        "kind": config.model_type,
        "num_ranks": generator.groups.dims.world_size,
        "neighbors": asdict(config.neighbor_shape()) if is_retro else None,  # type: ignore
        "stats": encoded_stats(engine.stats()),
    }


def follow(config: ServeConfig, stage: StageRun) -> None:
    """Compute on any rank but the first, until that one ends."""
    with model_on_ranks(config) as generator:
        engine = build(config, generator)
        assert isinstance(engine, BatchFollower | Follower)
        stage.defer_signals()  # the first rank says when to end
        engine.run()


def build(
    config: ServeConfig, generator: ModelOnRanks
) -> BatchEngine | BatchFollower | DynamicEngine | Follower:
    """The engine that runs the model, on the first rank; what follows it on the others."""
    try:
        check_family(generator.config)
    except ConfigError:
        kind = generator.config.model_type
        of_blocks = ("inference_weight_dtype", "kv_cache_dtype", "inference_attention_backend")
        for name in of_blocks:
            if (value := getattr(config.engine, name)) is not None:
                raise ConfigError(
                    f"{flag(name)} {value} is not for a {kind}; leave it out"
                ) from None
        if generator.groups.rank:
            return BatchFollower(generator)
        log.info("a %s generates in batches that start together", kind)
        most = config.engine.inference_dynamic_batching_max_requests
        return BatchEngine(generator, most, config.inference_max_seq_length)
    return build_engine(generator, config.engine, max_seq_length=config.inference_max_seq_length)


if __name__ == "__main__":
    exit_now(main())
