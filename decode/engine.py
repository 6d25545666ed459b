"""The engine: requests come at any time, wait for a row, have their prompts read, and end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from inspect import signature
from itertools import count, islice
from threading import RLock
from typing import Any, overload

import torch

from decode.arguments import naming_arguments
from decode.models.adapters import list_adapters
from decode.prefill import Prefixes
from decode.proposer import GivenProposer, Proposer, as_proposer, check_proposer, find_member, makes_proposers
from decode.request import Request, read_nodes, read_requests
from decode.requests.answer import Chunk
from decode.requests.numbers import check_switches, read_count, read_whole
from decode.requests.text import Prompt
from decode.scheduler import Scheduler
from decode.target import Target, check_target
from decode.trees.accept import AcceptanceRule, accept, accept_lossily

MOST_AT_ONCE = 1 << 12  # requests with the same prompt
SETTINGS = [*signature(read_requests).parameters][3:-2]  # of a request, after target, prompts and ids


class Engine:
    """Answers requests that join, leave and are cancelled at any time, from any thread.

    target, proposer: as in `decode.stream`. Iterating the engine yields the chunks of all requests until none is left;
    iterating a request yields its own. Whoever iterates drives; `async for` does so in a thread of the engine's.
    Adapters that requests name get a proposer each, so `proposer` is then a name, None, or a function that makes one.
    rows: requests that are decoded together, of those with the same adapter; others wait for their turn.
    nodes: the most nodes of a tree, root included.
    part: the most tokens of prompts that are read between two steps of the others; None: as many as take ten times as
    long as a pass over one token. While nothing is decoded, prompts are read at once.
    kept_bytes: of keys, values and features of texts that have ended. A prompt that begins like one of them, or like
    the text of a request that runs, is read from there on. 0: nothing is kept, and prompts are read whole.

    A request's answer does not depend on the others. Where it fails, it ends with "error" and they go on. Raises
    ValueError and TypeError as `stream` does.
    """

    @naming_arguments("Engine")
    def __init__(
        self,
        target: Target,
        proposer: GivenProposer = "auto",
        *,
        rows: int = 8,
        nodes: int = 64,
        part: int | None = None,
        kept_bytes: int = 1 << 28,
        lossy_typical_acceptance: bool = False,
    ) -> None:
        check_target(target)
        check_proposer(proposer)
        check_switches(lossy_typical_acceptance=lossy_typical_acceptance)
        self.target, self.nodes, self._given = target, read_nodes(nodes), proposer
        self._rule: AcceptanceRule = accept_lossily if lossy_typical_acceptance else accept
        kept_bytes = read_whole(kept_bytes, "kept_bytes", 0)
        self.prefixes = Prefixes(kept_bytes) if kept_bytes else None
        self._make_scheduler = partial(
            Scheduler,
            rows=read_count(rows, "rows"),
            nodes=self.nodes,
            part=None if part is None else read_count(part, "part"),
            prefixes=self.prefixes,
            rule=self._rule,
        )
        self.scheduler = self._make_scheduler(target, as_proposer(proposer, target))
        # By adapter. Those that have waited longest for a step come first.
        self._schedulers: dict[str | None, Scheduler] = {None: self.scheduler}
        self._ids, self._adding, self._stepping = count(), RLock(), RLock()
        self._requests: dict[int, Request] = {}  # that have not ended, by id
        self._is_closed = self._has_cancelled = False
        self._thread = ThreadPoolExecutor(1, "draftless")  # started by the first `step_async`
        self._task: Future[None] | None = None  # a step in it

    @overload
    def add(
        self,
        prompt: Prompt,
        *,
        request_id: int | None = None,
        noise_id: int | None = None,
        adapter: str | None = None,
        **settings: Any,
    ) -> Request: ...

    @overload
    def add(
        self, prompt: Prompt, *, n: int, noise_id: int | None = None, adapter: str | None = None, **settings: Any
    ) -> list[Request]: ...

    @naming_arguments("Engine.add", SETTINGS)
    def add(
        self,
        prompt: Prompt,
        *,
        request_id: int | None = None,
        noise_id: int | None = None,
        n: int | None = None,
        adapter: str | None = None,
        **settings: Any,
    ) -> Request | list[Request]:
        """Add a request. Its settings are those of `decode.stream` for one prompt; None stands for a default.

        request_id: None takes the next number. noise_id: keys the noise; None takes the request's number. With a noise
        id the same seed gives the same text again. n: add so many requests, for other answers to the same prompt, which
        is read once; they are returned as a list. Their noise ids are that one and those after it. adapter: answer
        with this adapter of a peft model, see `Target.adapt`; None: with the model as it is. Raises ValueError and
        TypeError as `stream` does, and RuntimeError for a closed engine.
        """
        if n is not None and request_id is not None:
            raise ValueError("n requests have ids of their own; leave out request_id")
        count = 1 if n is None else read_count(n, "n")
        if count > MOST_AT_ONCE:
            raise ValueError(f"n is {n}; at most {MOST_AT_ONCE} requests are added at once")
        with self._adding:
            free = (each for each in self._ids if each not in self._requests)  # others were chosen by the caller
            ids = [*islice(free, count)] if request_id is None else [request_id]
        scheduler = self._find_scheduler(adapter)
        defaults: dict[str, Any] = {"nodes": self.nodes, "sampled": find_member(scheduler.proposer, "sampled")}
        given = {name: value for name, value in settings.items() if value is not None}
        requests = read_requests(scheduler.target, [prompt] * len(ids), ids, **defaults | given)
        if noise_id is not None:
            first = read_whole(noise_id, "noise_id", 0)
            for place, request in enumerate(requests):
                request.noise_id = first + place
        self.submit(requests, scheduler)
        return requests[0] if n is None else requests

    def submit(self, requests: Sequence[Request], scheduler: Scheduler | None = None) -> None:
        """Add requests that `read_requests` has made. scheduler: of their adapter.

        Raises as `add` does, before any is added.
        """
        scheduler = scheduler or self.scheduler
        self.target.backend.release_threads()  # another may make the steps
        with self._adding:
            if self._is_closed:
                raise RuntimeError("this engine is closed; make another")
            if scheduler.is_forgotten:
                raise ValueError(f"the model no longer has the adapter {scheduler.target.adapter!r}")
            for request in requests:
                if request.request_id in self._requests:
                    raise ValueError(f"request {request.request_id} is running; give each request an id of its own")
                if self._rule is accept_lossily and request.sampling.processors:
                    reason = "leave them out or use lossless acceptance"
                    raise ValueError(f"typical acceptance supports no logits processors; {reason}")
            for request in requests:
                request.engine, self._requests[request.request_id] = self, request
            scheduler.add(requests)

    def _find_scheduler(self, adapter: str | None) -> Scheduler:
        """That of an adapter, whose requests share passes."""
        if adapter is None:
            return self.scheduler
        if not isinstance(adapter, str):
            raise TypeError(f"adapter is {adapter!r}; it is the name of an adapter, or None")
        if (known := self._schedulers.get(adapter)) is not None:
            return known
        with self._stepping:  # modules are copied, so none may run
            target = self.target.adapt(adapter)
            if not makes_proposers(self._given):
                raise ValueError(
                    f"a {type(self._given).__name__} cannot draft for several adapters; give the engine a name, "
                    "such as 'auto', or a function that makes a proposer for a target"
                )
            if adapter not in self._schedulers:
                self._forget_adapters()
                self._schedulers[adapter] = self._make_scheduler(target, as_proposer(self._given, target))
            return self._schedulers[adapter]

    def _forget_adapters(self) -> None:
        """Free what adapters have that the model does not have any more."""
        names = list_adapters(self.target.model)
        with self._adding:
            for name, scheduler in [*self._schedulers.items()]:
                if name is not None and name not in names and not scheduler.is_busy:
                    del self._schedulers[name]
                    scheduler.is_forgotten = True

    def cancel(self, request: Request) -> None:
        """End a request with "cancelled" at the next step. One that has ended stays as it is."""
        request.is_cancelled = self._has_cancelled = True

    def close(self) -> None:
        """Cancel all requests and free what they used. No more can be added."""
        with self._adding:
            self._is_closed = True
        with self._stepping:
            self._end_all("cancelled")
            if self.prefixes is not None:
                self.prefixes.clear()
        self._thread.shutdown(wait=False)

    @property
    def proposer(self) -> Proposer:
        """What drafts for requests without an adapter."""
        return self.scheduler.proposer

    @property
    def rows(self) -> int:
        """How many requests are decoded together."""
        return self.scheduler.rows

    @property
    def is_busy(self) -> bool:
        """Whether a request is left."""
        return bool(self._requests)

    @property
    def running(self) -> int:
        """How many requests are decoded."""
        return sum(scheduler.running for scheduler in [*self._schedulers.values()])

    @property
    def waiting(self) -> int:
        """How many wait, or have prompts that are being read."""
        return max(0, len(self._requests) - self.running)

    def __iter__(self) -> Iterator[Chunk]:
        while self.is_busy:
            yield from self.step()

    def step(self) -> list[Chunk]:
        """One pass over the trees of all rows with the same adapter, and one over a part of their next prompts. Returns
        what they added. Adapters take turns.

        An error that is not of one request alone ends all requests, and is raised.
        """
        with self._stepping:
            try:
                with torch.inference_mode():  # a step makes hundreds of small calls, which cost less in this mode
                    chunks = self._end_cancelled() if self._has_cancelled else []
                    for adapter, scheduler in self._schedulers.items():
                        if scheduler.is_busy:  # the others come before it the next time
                            self._schedulers[adapter] = self._schedulers.pop(adapter)
                            chunks += scheduler.step()
                            break
                with self._adding:
                    for chunk in chunks:
                        if chunk.finish is not None:
                            del self._requests[chunk.request_id]
            except BaseException as error:
                self._end_all(*(("error", error) if isinstance(error, Exception) else ("cancelled",)))
                raise
            return chunks

    def _end_cancelled(self) -> list[Chunk]:
        """End the requests that were cancelled."""
        self._has_cancelled = False
        with self._adding:
            cancelled = [request for request in self._requests.values() if request.is_cancelled]
        chunks = [self.scheduler.end(request, "cancelled") for request in cancelled]
        for scheduler in self._schedulers.values():
            scheduler.drop()
        return chunks

    def drive(self, request: Request) -> None:
        """Make a step, unless another thread's step has given the request chunks meanwhile."""
        with self._stepping:
            if request.is_waited_for:
                self.step()

    async def step_async(self) -> None:
        """A step in another thread. All that wait at the same time share one, from any event loop."""
        self.target.backend.release_threads()
        with self._adding:
            is_closed = self._is_closed
            if not is_closed and (self._task is None or self._task.done()):
                task = Future[None]()
                task.set_running_or_notify_cancel()  # from now on no waiter can cancel it
                self._thread.submit(self._fulfil, task)
                self._task = task
            running = self._task
        if is_closed or running is None:  # `close` ends all requests after the step that runs
            await asyncio.sleep(0.01)
        else:
            await asyncio.wrap_future(running)

    def _fulfil(self, task: Future[None]) -> None:
        try:
            self.step()
        except StopIteration as error:  # no future takes one
            task.set_exception(RuntimeError(f"a step raised StopIteration({error})"))
        except BaseException as error:
            task.set_exception(error)
        else:
            task.set_result(None)

    def _end_all(self, finish: str, error: Exception | None = None) -> None:
        with self._adding:
            ended = [request for request in self._requests.values() if request.answer is None]
            self._requests.clear()
            for scheduler in self._schedulers.values():
                scheduler.drop_all()
        for request in ended:  # a step that was cut short may have ended some without their answers
            self.scheduler.end(request, request.finish or finish, request.exception if request.finish else error)
