"""What is refused, in the form that OpenAI's client library reads."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

VARIED = "prompt", "stop", "tool_choice"  # fields that may have several types
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
    """The first of pydantic's faults of a body, in one line that names the field: all of those of a field that may have
    several types."""
    fault = faults[0]
    place = ".".join(map(str, fault["loc"]))
    if (name := place.partition(".")[0]) in VARIED:
        found = [(*map(str, each["loc"][2:]), each["msg"]) for each in faults if each["loc"][0] == name]
        return Refusal(400, f"{name}: {'; or '.join(dict.fromkeys(map(': '.join, found)))}", name)
    if fault["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON ({fault.get('ctx', {}).get('error', fault['msg'])})")
    message = (
        "there is no such field, or it is not supported"
        if fault["type"] == "extra_forbidden"
        else fault["msg"].removeprefix("Value error, ")
    )
    return Refusal(400, f"{place}: {message}" if place else message, place or None)


async def refuse(http: Request, error: Exception) -> JSONResponse:
    """The answer to a request that raised an error."""
    if isinstance(error, HTTPException):
        error = Refusal(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
    return as_refusal(error).answer()


def as_refusal(error: Exception) -> Refusal:
    return error if isinstance(error, Refusal) else Refusal(500, f"{type(error).__name__}: {error}")
