"""Listens for clients on the first rank, beside the process of its engine; the other ranks compute
with that one. No torch on the first rank."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from stages.runtime.context import StageRun
from stages.serve.config import ServeConfig
from stages.serve.engine_process import EngineProcess
from trainyard.hosts import OURS
from trainyard.parallel.launcher import rank_of_environment
from trainyard.serving.outputs import ServedModel
from trainyard.serving.server import bind, serve
from trainyard.serving.service import EngineService

log = logging.getLogger(__name__)


def run(config: ServeConfig, stage: StageRun) -> dict[str, Any]:
    """Serve until a signal."""
    rank, _, _, _ = rank_of_environment()
    if rank:
        from stages.serve.engine import follow

        follow(config, stage)
        return {}
    listen = config.listen
    with bind(listen.host, listen.port) as listening, EngineProcess(config) as engine:
        served = served_model(config, engine)
        log.info("%s computes in process %d", served.name, engine.pid)
        serve(
            served,
            listening,
            host=listen.host,
            names=OURS | {name.lower() for name in (listen.host, *listen.allow_host)},
            key=listen.api_key(os.environ),
            started=lambda address: log.info("%s is served at %s", served.name, address),
        )
    return {}


def served_model(config: ServeConfig, engine: EngineProcess) -> ServedModel:
    """The model for clients; returns when it is loaded."""
    loaded = engine.loaded()
    service = EngineService(
        engine.connection,
        max_tokens=loaded.max_tokens,
        max_queued=config.limits.max_queued_requests,
        stats=loaded.stats,
    )
    service.why_gone = engine.why_gone
    return ServedModel(
        name=config.model_name,
        tokenizer=loaded.tokenizer,
        end_token=loaded.end_token,
        service=service,
        limits=config.limits,
        defaults=config.defaults,
        kind=loaded.kind,
        num_ranks=loaded.num_ranks,
        neighbors=loaded.neighbors,
        created=int(time.time()),
    )
