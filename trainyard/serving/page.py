"""The page at /: three files of this package, which load nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_router() -> APIRouter:
    """The routes; the files are read once."""
    router = APIRouter(include_in_schema=False)
    for path, (name, kind) in FILES.items():
        router.add_api_route(path, _file(Path(__file__).parent / name, kind), methods=["GET"])
    return router


def _file(path: Path, kind: str) -> Callable[[], Awaitable[Response]]:
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    response = Response(path.read_bytes(), media_type=kind, headers=headers)

    async def answer() -> Response:
        return response

    return answer
