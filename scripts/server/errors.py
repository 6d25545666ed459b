"""What is refused, in the form that OpenAI's client library reads."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """A request that is not answered. param: the field that is wrong. code: a word for it."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def answer(self) -> JSONResponse:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        return JSONResponse(self.body, self.status, headers)


def read_faults(faults: Any) -> Refusal:
    """The first of pydantic's faults of a body, in one line that names the field."""
    fault = faults[0]
    place = ".".join(str(part) for part in fault["loc"] if part != "body")
    if fault["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON ({fault.get('ctx', {}).get('error', fault['msg'])})")
    message = (
        "there is no such field, or it is not supported"
        if fault["type"] == "extra_forbidden"
        else fault["msg"].removeprefix("Value error, ")
    )
    return Refusal(400, f"{place}: {message}" if place else message, place or None)


class BodyLimit:
    """Ends a request whose body has more than `most` bytes with status 413. What is too much is not kept."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen, refusal = 0, Refusal(413, f"the body has more than {self.most} bytes")

        async def receive_some() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                while message.get("more_body"):
                    message = await receive()
                raise refusal
            return message

        async def send_unless_long(message: Message) -> None:
            if seen <= self.most:  # FastAPI would say that the body cannot be parsed
                await send(message)

        with suppress(Refusal):
            await self.app(scope, receive_some, send_unless_long)
        if seen > self.most:
            await refusal.answer()(scope, receive, send)
