"""ComfyRoute: a route whose refusals are in ComfyUI's form."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from core.errors import InvalidRequestError, StencilError
from entrypoints.comfy_api.refusals import refusal


class ComfyRoute(APIRoute):
    """A route whose refusals are in ComfyUI's form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_or_refuse(request: Request) -> Response:
            try:
                return await handle(request)
            except StencilError as error:
                return refusal(request, error)
            except RequestValidationError as error:
                first = error.errors()[0]
                return refusal(request, InvalidRequestError(f"Invalid '{first['loc'][-1]}': {first['msg']}."))

        return handle_or_refuse
