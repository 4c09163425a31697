"""An engine in this process as the target of a load test, by the same driver as a server."""

from __future__ import annotations

from collections.abc import Callable

from trainyard.errors import TrainyardError
from trainyard.inference.request import Request
from trainyard.load_test.driver import CLOCK, Answer, RequestError
from trainyard.load_test.workload import PlannedRequest
from trainyard.logging import one_line
from trainyard.serving.service import EngineService


class EngineTarget:
    """Times are measured where a client in this process receives the tokens."""

    def __init__(
        self, service: EngineService, make_request: Callable[[PlannedRequest], Request]
    ) -> None:
        """service: started. make_request: what the engine is to do for a planned request."""
        self._service, self._make_request = service, make_request

    async def send(self, request: PlannedRequest, answer: Answer) -> None:
        """See `Target`."""
        try:
            asked = self._make_request(request)
            with self._service.open([asked]) as stream:
                num_tokens = 0
                async for _, piece in stream:
                    if piece.tokens:
                        num_tokens += len(piece.tokens)
                        answer.on_text(CLOCK(), len(piece.tokens))
                    if piece.finish_reason is not None:
                        answer.on_usage(len(asked.prompt), num_tokens)
                        answer.on_finish(piece.finish_reason)
        except TrainyardError as error:
            raise RequestError(one_line(str(error))) from error
