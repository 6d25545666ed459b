"""The scheduler of one target's requests: they wait for a row, have their prompts read, are decoded, and end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import inf
from threading import RLock

from decode.devices.cost_curve import CostCurve
from decode.loop import Batch
from decode.prefill import ALIKE, Prefixes, lacks_memory
from decode.proposer import Proposer, find_member
from decode.reading import Reading
from decode.request import Request
from decode.requests.answer import Chunk
from decode.target import Target
from decode.trees.accept import AcceptanceRule

PATIENCE = 10.0  # the time of a part of a prompt at most, in passes over one token
LEAST, LONGEST = 64, 1 << 13  # tokens of a part, whatever it costs: fewer take longer each
WHOLE = 1 << 30  # tokens of a part: whole prompts


class Scheduler:
    """Decides in each step which prompts are read and which requests are decoded together.

    Arguments are those of `Engine`, whose lock is held in each call but `add` and the properties. prefixes: keeps texts
    that have ended, for all schedulers of an engine; None: none are kept. rule: how trees are accepted.
    """

    is_forgotten = False  # its adapter is gone, and it makes no steps any more

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        *,
        rows: int,
        nodes: int,
        part: int | None,
        prefixes: Prefixes | None,
        rule: AcceptanceRule,
    ) -> None:
        self.target, self.proposer, self.rows, self.nodes = target, proposer, rows, nodes
        self.prefixes, self._part, self._rule = prefixes, part, rule
        self._version = target.read_version()  # of the weights that all that is kept was computed with
        if prefixes is not None:
            prefixes.follow(self._version)
        self._waiting, self._adding = deque[Request](), RLock()
        self._reading: Reading | None = None
        self._batch: Batch | None = None

    def add(self, requests: Sequence[Request]) -> None:
        """Add requests, which wait. Any thread may do so at any time."""
        with self._adding:
            self._waiting.extend(requests)

    @property
    def is_busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._waiting) or self._reading is not None or self._batch is not None

    @property
    def running(self) -> int:
        """How many requests are decoded."""
        return len(batch.requests) if (batch := self._batch) is not None else 0

    def step(self) -> list[Chunk]:
        """One pass over the trees of all rows, and one over a part of the next prompts. Returns what they added."""
        chunks = self._follow_weights()
        if self._batch is not None and self._batch.last is not None:
            chunks += self._batch.step()
            if any(chunk.finish for chunk in chunks):
                self._release()
        if self._waiting or self._reading is not None:
            chunks += self._admit()
        return chunks

    def end(self, request: Request, finish: str, error: Exception | None = None) -> Chunk:
        """End a request's answer where it is. Returns its last chunk."""
        return request.deliver(request.end(finish, error), self.target.tokenizer)

    def drop(self) -> None:
        """Forget the requests that have ended, whether they waited, were read or were decoded."""
        with self._adding:
            self._waiting = deque(request for request in self._waiting if request.finish is None)
        if self._reading is not None and not self._reading.keep_running():
            self._reading = None
        self._release()

    def drop_all(self) -> None:
        """Forget all requests, and free what they used."""
        with self._adding:
            self._waiting.clear()
        self._end_batch()

    @property
    def part(self) -> int:
        """The most tokens of prompts that are read between two steps."""
        if self._part is None:
            is_known = self.target.deterministic or find_member(self.proposer, "adaptive")
            usual = self.target.backend.find_fixed_costs(self.target.model)
            cost = self.target.cost_curve() if is_known else CostCurve(*usual)
            size = cost.sizes[-1]
            slope = (cost(2 * size) - cost(size)) / size  # a padded curve is flat up to the next power of two
            more = (PATIENCE - cost(size)) / slope if slope > 0 else inf
            self._part = int(min(max(size + more, LEAST), LONGEST))
        return self._part

    def _admit(self) -> list[Chunk]:
        """Read prompts: whole ones if nothing is decoded, else a part of the next ones."""
        chunks = self._follow_weights(deep=True) if self._reading is None and self.running < self.rows else []
        most = left = self.part if self.running else WHOLE
        while left > 0 and (requests := self._reading.requests if self._reading else self._take_alike(left, most)):
            before = self._reading.tokens if self._reading else 0
            if self._reading is None and self._batch is not None and self._batch.session is not None:
                self._batch.session.settle()  # moving half of a row's nodes would spoil running answers
            reading: Reading | None = None
            try:
                reading = self._reading = self._reading or self._begin_reading(requests, most)
                read, seconds = reading.read_part()
                assert self._batch is not None
                for request in self._batch.requests:  # they have waited for it
                    request.stats.seconds.target += seconds
                joined = [] if read is None else self._batch.join(reading, read)
            except RuntimeError as error:  # `torch.OutOfMemoryError` is one
                if not lacks_memory(error):
                    raise
                error.__traceback__ = None  # its frames hold what was read so far
                self._reading, reading, left = None, None, left - 1
                self._release()
                chunks += [self.end(request, "error", error) for request in requests]
                continue
            left -= max(reading.tokens - before, 1)
            chunks += joined
            if read is not None:
                self._reading = None
                self._release()
        return chunks

    def _begin_reading(self, requests: list[Request], most: int) -> Reading:
        """Begin to read prompts, with a batch for them if there is none. most: tokens of a part."""
        if self._batch is None:
            if find_member(self.proposer, "adaptive"):
                self.target.warm_up(self.rows)
            self._batch = Batch(self.target, self.proposer, self.nodes, self._rule, self.prefixes, self._version)
        batch = self._batch
        return Reading(requests, batch.open, batch.find, batch.drafting.fuse, most)

    def _take_alike(self, left: int, most: int) -> list[Request]:
        """The next waiting request, and others whose prompts have a similar length and fit into a part with it.

        All, if nothing is decoded: no answer goes on before all their prompts are read. left: tokens of this part;
        most: of a whole one. A prompt that is too long for what is left waits for the next.
        """
        free = self.rows - self.running
        with self._adding:
            taken, different = list[Request](), set[tuple[int, ...]]()
            for request in islice(self._waiting, free):
                more = different | {tuple(request.sequence)}
                longest, shortest = max(map(len, more)), min(map(len, more))
                fits = len(more) * longest <= left and longest - shortest < ALIKE
                if not taken and longest > left and left < most:
                    return []
                if free == self.rows or fits or not taken or len(more) == len(different):
                    taken.append(request)
                    different = more
            for request in taken:
                self._waiting.remove(request)
            return taken

    def _follow_weights(self, deep: bool = False) -> list[Chunk]:
        """If the model's weights have changed, drop what was kept, and end the requests that earlier ones decode.

        Those with `follow_weights` wait for a row again. Their texts so far are read like prompts.
        """
        try:
            version = self.target.read_version(deep)
        except ValueError as error:
            if self.target.fault is None:
                raise
            with self._adding:
                requests = [*self._waiting, *self._list_begun()]
                self.drop_all()
            return [self.end(request, "error", error) for request in requests]
        if version == self._version:
            return []
        self._version = version
        if self.prefixes is not None:
            self.prefixes.follow(version)
        begun = self._list_begun()
        going = [request for request in begun if request.follow_weights]
        changed = ValueError("the model's weights changed while this answer was decoded; ask again")
        chunks = [self.end(request, "error", changed) for request in begun if not request.follow_weights]
        self._end_batch()
        with self._adding:
            self._waiting.extendleft(reversed(going))
        return chunks

    def _list_begun(self) -> list[Request]:
        """The requests that are decoded, or whose prompts are being read."""
        parts = [part.requests for part in (self._batch, self._reading) if part is not None]
        return [request for part in parts for request in part if request.finish is None]

    def _release(self) -> None:
        """Free the rows of requests that have ended, and a batch without requests."""
        if self._batch is not None and not self._batch.release() and self._reading is None:
            self._end_batch()

    def _end_batch(self) -> None:
        if self._batch is not None:
            self._batch.close()
        self._batch = self._reading = None
