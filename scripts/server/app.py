"""The endpoint: OpenAI's routes over one engine, which all requests share.

The engine's thread makes the steps. The event loop only waits for them, so it never waits for a pass.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from decode import Chunk, Engine, Request
from decode.grammars.grammar import make_matchers
from decode.requests.detokenizer import find_special, read_stop
from draftless_commands.server.errors import Refusal, as_refusal, read_faults, refuse
from draftless_commands.server.fields import ChatFields, TextFields
from draftless_commands.server.grammars import check_size
from draftless_commands.server.metrics import Metrics, Watch
from draftless_commands.server.replies import ChatReply, Reply, TextReply
from draftless_commands.server.tools import ToolReader, write_tools
from training.conversations import read_conversation
from training.rendering import Renderer

Body = TypeVar("Body", ChatFields, TextFields)
TEXT_TOKENS = 16  # of an answer of /v1/completions, unless it says more: OpenAI's default
LEFT = 499  # nginx's status for a client that has gone; nobody reads it


class Server:
    """Requests between HTTP and the engine. queue: how many may wait besides those that are decoded."""

    def __init__(self, engine: Engine, name: str, api_key: str | None = None, queue: int = 64) -> None:
        self.engine, self.name, self.api_key, self.queue = engine, name, api_key, queue
        self.target, self.metrics, self.began = engine.target, Metrics(engine, name), int(time.time())
        self.renderer = Renderer(self.target.tokenizer, ends=self.target.stop_ids)
        self._adding = threading.Lock()
        self._driver: asyncio.Task[None] | None = None

    async def check_key(self, http: HttpRequest) -> None:
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        if self.api_key is not None and not secrets.compare_digest(given.encode(), self.api_key.encode()):
            raise Refusal(401, "the API key is missing or wrong", code="invalid_api_key")

    def refuse_model(self, name: str) -> Refusal:
        return Refusal(404, f"there is no model {name!r}; {self.name!r} is served", "model", "model_not_found")

    async def answer(self, http: HttpRequest, fields: ChatFields | TextFields) -> Response:
        """The whole answer, or a stream of events."""
        if fields.model not in (None, self.name):
            raise self.refuse_model(fields.model)
        reply = await asyncio.to_thread(self._add, fields)
        self._drive()
        if fields.stream:
            events, end = self._stream(reply), BackgroundTask(self._abandon, reply.requests)
            return StreamingResponse(events, media_type="text/event-stream", background=end)
        whole, gone = asyncio.ensure_future(self._finish(reply.requests)), asyncio.ensure_future(wait_until_gone(http))
        await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not whole.done():
            whole.cancel()
            return Response(status_code=LEFT)
        await whole
        for request in reply.requests:
            check_end(request)
        return JSONResponse(await asyncio.to_thread(reply.whole))

    def _add(self, fields: ChatFields | TextFields) -> Reply:
        """Encode the prompts and add their requests. Raises Refusal for what cannot be answered."""
        choices = fields.n or 1
        requests: list[Request] = []
        try:
            grammar = fields.find_grammar()  # compiled before others have to wait for it
            if grammar is not None:
                tokenizer = self.target.tokenizer
                ends = self.target.stop_ids | find_special(read_stop(fields.stop), tokenizer)
                grammar = make_matchers(check_size(grammar), tokenizer, self.target.vocabulary, ends)
            with self._adding:  # tokenizers are not for several threads
                self._check_room(choices * len(fields.prompts))
                prompts = self._encode(fields)
                for number, prompt in enumerate(prompts):
                    settings = fields.read_settings(len(prompt), self.target.vocabulary) | {"grammar": grammar}
                    if settings["max_new_tokens"] is None:
                        room = self.target.context - len(prompt)
                        settings["max_new_tokens"] = room if isinstance(fields, ChatFields) else min(TEXT_TOKENS, room)
                    requests += self.engine.add(prompt, n=choices, noise_id=number * choices, **settings)
                    self.metrics.prompts.inc(len(prompt))
        except (ValueError, TypeError) as error:  # of the first prompt: the others have the same settings
            raise Refusal(400, str(error)) from error
        tokenizer = self.target.tokenizer
        if not isinstance(fields, ChatFields):
            return TextReply(self.name, tokenizer, requests, choices, fields.streamed)
        tools, readers = fields.given_tools, list[ToolReader]()
        if tools:
            calls = 1 if fields.parallel_tool_calls is False else None
            readers = [ToolReader(tokenizer, request.prompt, tools, fields.forced, calls) for request in requests]
        return ChatReply(self.name, tokenizer, requests, choices, fields.streamed, readers=readers)

    def _check_room(self, new: int) -> None:
        """Raise Refusal if the queue has no room for so many requests."""
        most, there = self.engine.rows + self.queue, self.engine.running + self.engine.waiting
        if new > most:
            raise Refusal(400, f"{new} answers are asked for; this server has room for {most}", "n")
        if there + new > most:
            raise Refusal(429, f"{there} of {most} places are taken; ask again later", code="queue_full")

    def _encode(self, fields: ChatFields | TextFields) -> list[list[int]]:
        """The tokens of the prompts. Raises ValueError or Refusal for what the model cannot read."""
        if isinstance(fields, ChatFields):
            if fields.messages[-1].get("role") == "assistant":
                raise Refusal(400, "the last message is the assistant's; there is nothing to answer", "messages")
            row = fields.conversation if self.renderer.takes("tools") else write_tools(fields.conversation)
            encoded = [self.renderer.encode(read_conversation(row, "messages", answered=False))]
        else:
            tokenizer = self.target.tokenizer
            encoded = [tokenizer(each)["input_ids"] if isinstance(each, str) else each for each in fields.prompts]
        context, vocabulary = self.target.context, self.target.vocabulary
        for prompt in encoded:
            if not prompt:
                raise Refusal(400, "the prompt has no tokens", "prompt")
            if not 0 <= min(prompt) <= max(prompt) < vocabulary:
                raise Refusal(400, f"the prompt has tokens that are none of 0 to {vocabulary - 1}", "prompt")
            if len(prompt) >= context:
                reason = f"the prompt has {len(prompt)} tokens; the model's context of {context} leaves no room"
                raise Refusal(400, reason, code="context_length_exceeded")
        return encoded

    async def _stream(self, reply: Reply) -> AsyncIterator[str]:
        try:
            for event in reply.begin():
                yield event
            async with aclosing(self._follow(reply.requests)) as chunks:
                async for index, chunk in chunks:
                    if chunk.finish is not None:
                        check_end(reply.requests[index])
                    if chunk.text or chunk.finish or chunk.log_probs or reply.streamed.include_sources:
                        yield reply.go_on(index, chunk)
        except Exception as error:  # the status is sent already
            yield reply.write(as_refusal(error).body)
        for event in reply.end():
            yield event

    async def _finish(self, requests: Sequence[Request]) -> None:
        async for _ in self._follow(requests):
            pass

    async def _follow(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Chunk]]:
        """The chunks of several requests as they come, with the request's index. Who stops early cancels them."""
        found: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue()

        async def pump(index: int, request: Request) -> None:
            watch = Watch(self.metrics)
            try:
                async for chunk in request:
                    watch.take(chunk)
                    found.put_nowait((index, chunk))
                found.put_nowait((index, None))
            except Exception as error:
                found.put_nowait((index, error))
            finally:
                watch.end(request.finish or "cancelled")

        pumps = [asyncio.ensure_future(pump(*pair)) for pair in enumerate(requests)]
        try:
            left = len(pumps)
            while left:
                index, chunk = await found.get()
                if isinstance(chunk, Exception):
                    raise chunk
                if chunk is None:
                    left -= 1
                else:
                    yield index, chunk
        finally:
            for task in pumps:
                task.cancel()
            await self._abandon(requests)

    async def _abandon(self, requests: Sequence[Request]) -> None:
        """Cancel the requests that have not ended: nobody waits for them any more."""
        for request in requests:
            if request.finish is None:
                self.engine.cancel(request)
        self._drive()

    def _drive(self) -> None:
        """Let steps be made until no request is left: a client may go away before it waits for one."""
        if self._driver is None or self._driver.done():
            self._driver = asyncio.ensure_future(self._make_steps())

    async def _make_steps(self) -> None:
        while self.engine.is_busy:
            try:
                await self.engine.step_async()
            except Exception as error:  # of all requests: whoever waits for one gets it too
                print(f"draftless serve: a step failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def check_end(request: Request) -> None:
    """Raise Refusal for an answer that did not end as it should."""
    if request.finish == "error":
        raise Refusal(500, request.answer.error if request.answer is not None else "the answer failed")
    if request.finish == "cancelled":
        raise Refusal(503, "the server ends")


async def read_body(http: HttpRequest, kind: type[Body], most: int) -> Body:
    """The fields of a body of at most so many bytes. What is too much is read, but not kept.

    Another content type is refused: web pages of others may send such bodies to a server on this machine.
    """
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, "the body is JSON; send it with Content-Type: application/json")
    body, size = list[bytes](), 0
    try:
        async for part in http.stream():
            size += len(part)
            if size <= most:
                body.append(part)
    except ClientDisconnect as error:
        raise Refusal(LEFT, "the client has gone") from error
    if size > most:
        raise Refusal(413, f"the body has more than {most} bytes")
    try:
        return kind.model_validate_json(b"".join(body))
    except ValidationError as error:
        raise read_faults(error.errors()) from error


async def wait_until_gone(http: HttpRequest) -> None:
    """Wait until the client has closed its connection. The body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def refuse_other_hosts(http: HttpRequest) -> None:
    """Raise Refusal for a request that names another host than this machine.

    A web page of others may let its own name lead to 127.0.0.1 (DNS rebinding), so that browsers let it read answers.
    """
    given = http.headers.get("host", "")
    name = given.removeprefix("[").partition("]")[0] if given.startswith("[") else given.partition(":")[0]
    if name != "localhost" and not _is_local(name):
        raise Refusal(403, f"the host is {given!r}; this server is for this machine: give it an --api-key, or --host")


def _is_local(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def make_app(server: Server, host: str = "127.0.0.1", most_bytes: int = 2 << 20) -> FastAPI:
    """The application. host: the address that it is served at. most_bytes: of a request's body."""

    @asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.engine.close)

    refusals = dict.fromkeys((Refusal, HTTPException, Exception), refuse)
    checked = [Depends(refuse_other_hosts)] if server.api_key is None and _is_local(host) else []
    app = FastAPI(title="Draftless", lifespan=live, openapi_url=None, exception_handlers=refusals, dependencies=checked)
    keyed = [Depends(server.check_key)]

    @app.post("/v1/chat/completions", dependencies=keyed)
    async def chat(http: HttpRequest) -> Response:
        return await server.answer(http, await read_body(http, ChatFields, most_bytes))

    @app.post("/v1/completions", dependencies=keyed)
    async def complete(http: HttpRequest) -> Response:
        return await server.answer(http, await read_body(http, TextFields, most_bytes))

    @app.api_route("/v1/models", methods=["GET", "HEAD"], dependencies=keyed)
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [describe(server)]}

    @app.get("/v1/models/{name:path}", dependencies=keyed)
    async def find_model(name: str) -> dict[str, Any]:
        if name != server.name:
            raise server.refuse_model(name)
        return describe(server)

    @app.get("/")
    async def show_page() -> FileResponse:
        return FileResponse(Path(__file__).with_name("page.html"))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def tell_health() -> Response:
        return Response()

    @app.get("/metrics")
    async def tell_metrics() -> Response:
        return Response(server.metrics.write(), media_type="text/plain; version=0.0.4")

    return app


def describe(server: Server) -> dict[str, Any]:
    return {"id": server.name, "object": "model", "created": server.began, "owned_by": "draftless"}


class GraceServer(uvicorn.Server):
    """uvicorn that ends the engine, and with it all answers, some seconds after it was told to end."""

    def __init__(self, app: FastAPI, engine: Engine, grace: int) -> None:
        last = grace + 5  # then uvicorn breaks off what is left
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=last))
        self.engine, self.grace = engine, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end = threading.Thread(target=self.engine.close, daemon=True)
        asyncio.get_running_loop().call_later(self.grace, end.start)
        await super().shutdown(sockets)
