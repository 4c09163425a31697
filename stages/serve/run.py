"""Loads the model, and serves it from the first rank; the others compute with it."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from stages.runtime.context import StageRun
from stages.serve.config import ServeConfig
from trainyard.errors import ConfigError
from trainyard.hosts import OURS
from trainyard.inference.dynamic.build import build_engine, check_family
from trainyard.inference.dynamic.engine import DynamicEngine
from trainyard.inference.dynamic.ranks import Follower
from trainyard.inference.engine import Engine
from trainyard.inference.load import ModelOnRanks
from trainyard.inference.on_ranks import model_on_ranks
from trainyard.parallel.launcher import rank_of_environment
from trainyard.serving.batch_engine import BatchEngine, BatchFollower
from trainyard.serving.outputs import ServedModel
from trainyard.serving.server import bind, serve
from trainyard.serving.service import EngineService

log = logging.getLogger(__name__)


def run(config: ServeConfig, stage: StageRun) -> dict[str, Any]:
    """Serve until a signal."""
    rank, _, _, _ = rank_of_environment()
    listen = config.listen
    listening = bind(listen.host, listen.port) if rank == 0 else None
    with model_on_ranks(config) as generator:
        engine = build(config, generator)
        if isinstance(engine, BatchFollower | Follower):
            stage.defer_signals()  # the first rank says when to end
            engine.run()
            return {}
        assert listening is not None
        served = served_model(config, generator, engine)
        serve(
            served,
            listening,
            host=listen.host,
            names=OURS | {name.lower() for name in (listen.host, *listen.allow_host)},
            key=listen.api_key(os.environ),
            started=lambda address: log.info("%s is served at %s", served.name, address),
        )
        engine.close()
    return {}


def build(
    config: ServeConfig, generator: ModelOnRanks
) -> BatchEngine | BatchFollower | DynamicEngine | Follower:
    """The engine that runs the model, on the first rank; what follows it on the others."""
    try:
        check_family(generator.config)
    except ConfigError:
        kind, weights = generator.config.model_type, config.engine.inference_weight_dtype
        if weights is not None:
            raise ConfigError(
                f"--inference-weight-dtype {weights} is not for a {kind}; leave it out"
            ) from None
        if generator.groups.rank:
            return BatchFollower(generator)
        log.info("a %s generates in batches that start together", kind)
        most = config.engine.inference_dynamic_batching_max_requests
        return BatchEngine(generator, most, config.inference_max_seq_length)
    return build_engine(generator, config.engine, max_seq_length=config.inference_max_seq_length)


def served_model(config: ServeConfig, generator: ModelOnRanks, engine: Engine) -> ServedModel:
    """The model for clients."""
    return ServedModel(
        name=config.model_name,
        tokenizer=generator.tokenizer,
        end_token=generator.end_token,
        service=EngineService(engine, max_queued=config.limits.max_queued_requests),
        limits=config.limits,
        defaults=config.defaults,
        generator=generator,
        continues=generator.config.model_type != "t5",
        created=int(time.time()),
    )
