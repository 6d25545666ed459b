"""How many nodes to draft, and whether to draft at all: learned from what was accepted and from the time it took.

Time is counted in target passes over a single node, which is what plain decoding spends on a token. Tokens are a
row's, on average over the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

MEMORY = 0.97  # of what was learned, what is kept a step
TRUST = 2.0  # tokens that a head's own confidences count for: few, so that drafts that do not pay end after a few
RESTS = (4, 8, 16, 32, 64)  # steps without a draft, where drafts do not pay


class Pace:
    """Chooses what brings most tokens a second in the long run.

    A step of some time is worth its tokens less rate x time, where rate is the speed that steps have on average: time
    spent here is missing there (the rule of renewal rewards; most tokens a second for each step by itself would be
    too much where guesses are poor and too little where they are good).

    hopes: the tau that trees of 1, 2, ... nodes should have on average.
    """

    def __init__(self, hopes: Sequence[float] = (1.0, inf)) -> None:
        self.hopes = hopes
        self.cost: Callable[[int], float] = float  # until a text begins
        self.accepted = self.expected = 0.0  # tokens of drafts, lately
        self.steps = self.time = 1.0  # with drafts, lately
        self.nodes = 1  # of the last tree
        self._hoped: float | None = None  # tokens expected of it; None: it was no draft
        self._hopeful = True
        self._rest, self._rests = 0, 0
        self._level_seconds = self._pass_seconds = inf  # the shortest seen: other work on the machine only adds

    @property
    def factor(self) -> float:
        """How many tokens are accepted for each that was expected."""
        return (TRUST + self.accepted) / (TRUST + self.expected)

    @property
    def rate(self) -> float:
        """Tokens a unit of time in steps with drafts. What they accept varies more than what is expected of them."""
        return (self.steps + self.factor * self.expected) / self.time

    @property
    def level_time(self) -> float:
        """What drafting one level takes; 0 until it is known."""
        known = max(self._level_seconds, self._pass_seconds) < inf
        return self._level_seconds / self._pass_seconds if known else 0.0

    def begin(self, cost: Callable[[int], float], anew: bool = True) -> None:
        """Another number of rows, for which a pass over n nodes takes cost(n) passes over one; `anew`: other texts.

        A first try runs over the whole prompts. Where the calibration gives no hope, as in large batches on a CPU, it
        is made late. What does not pay in a large batch may pay in a smaller one.
        """
        if cost is not self.cost:
            self.cost, self._level_seconds, self._pass_seconds = cost, inf, inf
        hopeful = any(tau > cost(nodes) for nodes, tau in enumerate(self.hopes[1:], start=2))
        if anew or hopeful > self._hopeful:
            self._hopeful = hopeful
            self._rests, self._rest = (0, 0) if hopeful else (len(RESTS), RESTS[-1])

    def rests(self) -> bool:
        """Whether to draft nothing in this step. To be asked once a step."""
        if self._rest == 0:
            return False
        self._rest -= 1
        self.skip()
        return True

    def skip(self) -> None:
        """Take note that the tree of this step is the root alone."""
        self.nodes, self._hoped = 1, None

    def pays(self, chance: float) -> bool:
        """Whether one more level pays, where that is the chance that a guess before it is right."""
        return self.factor * chance > max(self.rate, 1.0) * self.level_time

    def choose(self, gains: Sequence[float], levels: int) -> int:
        """The number of nodes: `gains[n - 1]` are the accepted tokens expected of n nodes."""
        rate = max(self.rate, 1.0)  # plain decoding can be had in any case
        worth = [self.factor * gain - rate * self.cost(nodes) for nodes, gain in enumerate(gains, start=1)]
        return self._take(1 + worth.index(max(worth)), gains, levels)

    def grow(self, gains: Sequence[float], levels: int) -> int:
        """The number of nodes, where nothing may be known of those after a node when that is decided on.

        The first that does not pay is left out, and all after it. One pays that would if those up to some larger tree
        were as good: many sizes may cost the same.
        """
        rate = max(self.rate, 1.0)
        costs = [self.cost(nodes) for nodes in range(1, len(gains) + 1)]
        nodes = 1
        while nodes < len(gains):
            rise = min((more - costs[nodes - 1]) / step for step, more in enumerate(costs[nodes:], start=1))
            if self.factor * (gains[nodes] - gains[nodes - 1]) <= rate * rise:
                break
            nodes += 1
        return self._take(nodes, gains, levels)

    def _take(self, nodes: int, gains: Sequence[float], levels: int) -> int:
        self.nodes, self._hoped = nodes, gains[nodes - 1]
        self.steps = MEMORY * self.steps + 1
        self.time = MEMORY * self.time + self.cost(nodes) + levels * self.level_time
        return nodes

    def learn(self, accepted: float, seconds: float) -> None:
        """How many tokens of the last tree were accepted, and how long the target took for it."""
        self._pass_seconds = min(self._pass_seconds, seconds / self.cost(self.nodes))
        if self._hoped is None:
            return
        self.accepted = MEMORY * self.accepted + accepted
        self.expected = MEMORY * self.expected + self._hoped
        if self.rate >= 1:
            self._rests = 0
        else:
            self._rest = RESTS[min(self._rests, len(RESTS) - 1)]
            self._rests += 1

    def clock(self, seconds: float, levels: int) -> None:
        """How long it took to draft so many levels."""
        self._level_seconds = min(self._level_seconds, seconds / levels)
