"""The engine: requests come at any time, wait for a row, have their prompts read, and end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from inspect import signature
from itertools import count, islice
from math import inf
from pathlib import Path
from threading import RLock
from typing import Any, overload

import torch

from decode.arguments import naming_arguments
from decode.devices.cost_curve import CostCurve
from decode.given_proposer import as_proposer, check_proposer
from decode.loop import Batch
from decode.prefill import ALIKE, Prefixes
from decode.proposer import Proposer, find_member
from decode.reading import Reading
from decode.request import Request, read_nodes, read_requests
from decode.requests.answer import Chunk
from decode.requests.numbers import read_count, read_whole
from decode.requests.text import Prompt
from decode.target import Target, check_target
from decode.trees.accept import AcceptanceRule, accept, accept_lossily

PATIENCE = 10.0  # the time of a part of a prompt at most, in passes over one token
LEAST, LONGEST = 64, 1 << 13  # tokens of a part, whatever it costs: fewer take longer each
WHOLE = 1 << 30  # tokens of a part: whole prompts
MOST_AT_ONCE = 1 << 12  # requests with the same prompt
SETTINGS = [*signature(read_requests).parameters][3:-2]  # of a request, after target, prompts and ids


class Engine:
    """Answers requests that join, leave and are cancelled at any time, from any thread.

    target, proposer: as in `decode.stream`. Iterating the engine yields the chunks of all requests until none is left;
    iterating a request yields its own. Whoever iterates drives; `async for` does so in a thread of the engine's.
    rows: requests that are decoded together; others wait for their turn.
    nodes: the most nodes of a tree, root included.
    part: the most tokens of prompts that are read between two steps of the others; None: as many as take `PATIENCE`
    times as long as a pass over one token. While nothing is decoded, prompts are read at once.
    kept_bytes: of keys, values and features of texts that have ended. A prompt that begins like one of them, or like
    the text of a request that runs, is read from there on. 0: nothing is kept, and prompts are read whole.

    A request's answer does not depend on the others. Where it fails, it ends with "error" and they go on. Raises
    ValueError and TypeError as `stream` does.
    """

    @naming_arguments("Engine")
    def __init__(
        self,
        target: Target,
        proposer: Proposer | str | Path | None = "auto",
        *,
        rows: int = 8,
        nodes: int = 64,
        part: int | None = None,
        kept_bytes: int = 1 << 28,
        lossy_typical_acceptance: bool = False,
    ) -> None:
        check_target(target)
        check_proposer(proposer)
        self.target, self.rows, self.nodes = target, read_count(rows, "rows"), read_nodes(nodes)
        self._part = None if part is None else read_count(part, "part")
        self.proposer = as_proposer(proposer, target)
        kept_bytes = read_whole(kept_bytes, "kept_bytes", 0)
        self.prefixes = Prefixes(kept_bytes) if kept_bytes else None
        self._version = target.read_version()  # of the weights that all that is kept was computed with
        self._rule: AcceptanceRule = accept_lossily if lossy_typical_acceptance else accept
        self._ids, self._adding, self._stepping = count(), RLock(), RLock()
        self._requests: dict[int, Request] = {}  # that have not ended, by id
        self._waiting = deque[Request]()
        self._reading: Reading | None = None
        self._batch: Batch | None = None
        self._is_closed = self._has_cancelled = False
        self._thread = ThreadPoolExecutor(1, "draftless")  # started by the first `step_async`
        self._task: Future[None] | None = None  # a step in it

    @overload
    def add(
        self, prompt: Prompt, *, request_id: int | None = None, noise_id: int | None = None, **settings: Any
    ) -> Request: ...

    @overload
    def add(self, prompt: Prompt, *, n: int, noise_id: int | None = None, **settings: Any) -> list[Request]: ...

    @naming_arguments("Engine.add", SETTINGS)
    def add(
        self,
        prompt: Prompt,
        *,
        request_id: int | None = None,
        noise_id: int | None = None,
        n: int | None = None,
        **settings: Any,
    ) -> Request | list[Request]:
        """Add a request. Its settings are those of `decode.stream` for one prompt; None stands for a default.

        request_id: None takes the next number. noise_id: keys the noise; None takes the request's number. With a noise
        id the same seed gives the same text again. n: add so many requests, for other answers to the same prompt, which
        is read once; they are returned as a list. Their noise ids are that one and those after it. Raises ValueError
        and TypeError as `stream` does, and RuntimeError for a closed engine.
        """
        if n is not None and request_id is not None:
            raise ValueError("n requests have ids of their own; leave out request_id")
        count = 1 if n is None else read_count(n, "n")
        if count > MOST_AT_ONCE:
            raise ValueError(f"n is {n}; at most {MOST_AT_ONCE} requests are added at once")
        with self._adding:
            free = (each for each in self._ids if each not in self._requests)  # others were chosen by the caller
            ids = [*islice(free, count)] if request_id is None else [request_id]
        defaults: dict[str, Any] = {"nodes": self.nodes, "sampled": find_member(self.proposer, "sampled")}
        given = {name: value for name, value in settings.items() if value is not None}
        requests = read_requests(self.target, [prompt] * len(ids), ids, **defaults | given)
        if noise_id is not None:
            first = read_whole(noise_id, "noise_id", 0)
            for place, request in enumerate(requests):
                request.noise_id = first + place
        self.submit(requests)
        return requests[0] if n is None else requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests that `read_requests` has made. Raises as `add` does, before any is added."""
        self.target.backend.release_threads()  # another may make the steps
        with self._adding:
            if self._is_closed:
                raise RuntimeError("this engine is closed; make another")
            for request in requests:
                if request.request_id in self._requests:
                    raise ValueError(f"request {request.request_id} is running; give each request an id of its own")
                if self._rule is accept_lossily and request.sampling.processors:
                    reason = "leave them out or use lossless acceptance"
                    raise ValueError(f"typical acceptance supports no logits processors; {reason}")
            for request in requests:
                request.engine, self._requests[request.request_id] = self, request
            self._waiting.extend(requests)

    def cancel(self, request: Request) -> None:
        """End a request with "cancelled" at the next step. One that has ended stays as it is."""
        request.is_cancelled = self._has_cancelled = True

    def close(self) -> None:
        """Cancel all requests and free what they used. No more can be added."""
        with self._adding:
            self._is_closed = True
        with self._stepping:
            self._end_all("cancelled")
        self._thread.shutdown(wait=False)

    @property
    def is_busy(self) -> bool:
        """Whether a request is left."""
        return bool(self._requests)

    @property
    def running(self) -> int:
        """How many requests are decoded."""
        return len(batch.requests) if (batch := self._batch) is not None else 0

    @property
    def waiting(self) -> int:
        """How many wait, or have prompts that are being read."""
        return max(0, len(self._requests) - self.running)

    def __iter__(self) -> Iterator[Chunk]:
        while self.is_busy:
            yield from self.step()

    def step(self) -> list[Chunk]:
        """One pass over the trees of all rows, and one over a part of the next prompts. Returns what they added.

        An error that is not of one request alone ends all requests, and is raised.
        """
        with self._stepping:
            try:
                with torch.inference_mode():  # a step makes hundreds of small calls, which cost less in this mode
                    chunks = self._end_cancelled() if self._has_cancelled else []
                    chunks += self._follow_weights()
                    if self._batch is not None and self._batch.last is not None:
                        chunks += self._batch.step()
                        if any(chunk.finish for chunk in chunks):
                            self._release()
                    if self._waiting or self._reading is not None:
                        chunks += self._admit()
            except BaseException as error:
                self._end_all(*(("error", error) if isinstance(error, Exception) else ("cancelled",)))
                raise
            with self._adding:
                for chunk in chunks:
                    if chunk.finish is not None:
                        del self._requests[chunk.request_id]
            return chunks

    def drive(self, request: Request) -> None:
        """Make a step, unless another thread's step has given the request chunks meanwhile."""
        with self._stepping:
            if request.is_waited_for:
                self.step()

    async def step_async(self) -> None:
        """A step in another thread. All that wait at the same time share one, from any event loop."""
        self.target.backend.release_threads()
        if self._is_closed:  # `close` ends all requests after the step that runs
            await asyncio.sleep(0.01)
            return
        with self._adding:
            if self._task is None or self._task.done():
                task = Future[None]()
                task.set_running_or_notify_cancel()  # from now on no waiter can cancel it
                self._thread.submit(self._fulfil, task)
                self._task = task
            task = self._task
        await asyncio.wrap_future(task)

    def _fulfil(self, task: Future[None]) -> None:
        try:
            self.step()
        except StopIteration as error:  # no future takes one
            task.set_exception(RuntimeError(f"a step raised StopIteration({error})"))
        except BaseException as error:
            task.set_exception(error)
        else:
            task.set_result(None)

    @property
    def part(self) -> int:
        """The most tokens of prompts that are read between two steps."""
        if self._part is None:
            is_known = self.target.deterministic or find_member(self.proposer, "adaptive")
            usual = self.target.backend.find_fixed_costs(self.target.model)
            cost = self.target.cost_curve() if is_known else CostCurve(*usual)
            size, slope = cost.sizes[-1], cost(cost.sizes[-1] + 1) - cost(cost.sizes[-1])
            more = (PATIENCE - cost(size)) / slope if slope > 0 else inf
            self._part = int(min(max(size + more, LEAST), LONGEST))
        return self._part

    def _admit(self) -> list[Chunk]:
        """Read prompts: whole ones if nothing is decoded, else a part of the next ones."""
        chunks = self._follow_weights(deep=True) if self._reading is None and self._count_free() else []
        most = left = self.part if self._batch is not None and self._batch.requests else WHOLE
        while left > 0 and (reading := self._reading or self._begin_reading(left, most)):
            before = reading.tokens
            chunks += self._read_on(reading)
            left -= max(reading.tokens - before, 1)
        return chunks

    def _count_free(self) -> int:
        """The rows that requests can join."""
        return self.rows - (len(self._batch.requests) if self._batch is not None else 0)

    def _begin_reading(self, left: int, most: int) -> Reading | None:
        """Begin to read the next prompts, if there are any and rows for them. left, most: see `_take_alike`."""
        if requests := self._take_alike(left, most):
            batch = self._batch = self._batch or self._begin_batch()
            self._reading = Reading(requests, batch.open, batch.find, batch.drafting.fuse, most)
        return self._reading

    def _begin_batch(self) -> Batch:
        if find_member(self.proposer, "adaptive"):
            self.target.warm_up(self.rows)
        return Batch(self.target, self.proposer, self.nodes, self._rule, self.prefixes)

    def _take_alike(self, left: int, most: int) -> list[Request]:
        """The next waiting request, and others whose prompts have a similar length and fit into a part with it.

        All, if nothing is decoded: no answer goes on before all their prompts are read. left: tokens of this part;
        most: of a whole one. A prompt that is too long for what is left waits for the next.
        """
        is_start = self._count_free() == self.rows
        with self._adding:
            taken, different = list[Request](), set[tuple[int, ...]]()
            for request in islice(self._waiting, self._count_free()):
                more = different | {tuple(request.prompt)}
                longest, shortest = max(map(len, more)), min(map(len, more))
                fits = len(more) * longest <= left and longest - shortest < ALIKE
                if not taken and longest > left and left < most:
                    return []
                if is_start or fits or not taken or len(more) == len(different):
                    taken.append(request)
                    different = more
            for request in taken:
                self._waiting.remove(request)
            return taken

    def _read_on(self, reading: Reading) -> list[Chunk]:
        """Read a part of prompts; their requests join once they are read."""
        assert self._batch is not None
        try:
            read, seconds = reading.read_part()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
                raise
            self._reading = None
            self._release()
            return [self._end(request, "error", error) for request in reading.requests]
        for request in self._batch.requests:  # they have waited for it
            request.stats.seconds.target += seconds
        if read is None:
            return []
        chunks = self._batch.join(reading, read)
        self._reading = None
        self._release()
        return chunks

    def _end_cancelled(self) -> list[Chunk]:
        """End the requests that were cancelled."""
        self._has_cancelled = False
        with self._adding:
            cancelled = [request for request in self._requests.values() if request.is_cancelled]
            self._waiting = deque(request for request in self._waiting if not request.is_cancelled)
        chunks = [self._end(request, "cancelled") for request in cancelled]
        if self._reading is not None and not self._reading.keep_running():
            self._reading = None
        self._release()
        return chunks

    def _follow_weights(self, deep: bool = False) -> list[Chunk]:
        """If the model's weights have changed, drop what was kept, and end the requests that earlier ones decode."""
        version = self.target.read_version(deep)
        if version == self._version:
            return []
        self._version = version
        if self.prefixes is not None:
            self.prefixes.clear()
        begun = [*(self._batch.requests if self._batch else ()), *(self._reading.requests if self._reading else ())]
        error = ValueError("the model's weights changed while this answer was decoded; ask again")
        chunks = [self._end(request, "error", error) for request in begun if request.finish is None]
        self._end_batch()
        return chunks

    def _release(self) -> None:
        """Free the rows of requests that have ended, and a batch without requests."""
        if self._batch is not None and not self._batch.release() and self._reading is None:
            self._end_batch()

    def _end_batch(self) -> None:
        if self._batch is not None:
            self._batch.close()
        self._batch = self._reading = None

    def _end(self, request: Request, finish: str, error: Exception | None = None) -> Chunk:
        return request.deliver(request.end(finish, error), self.target.tokenizer)

    def _end_all(self, finish: str, error: Exception | None = None) -> None:
        with self._adding:
            ended = [request for request in self._requests.values() if request.answer is None]
            self._requests.clear()
            self._waiting.clear()
        for request in ended:  # a step that was cut short may have ended some without their answers
            self._end(request, request.finish or finish, request.exception if request.finish else error)
        self._end_batch()
