"""The draft budget: how many nodes to draft, and whether to draft at all.

It weighs the tokens that a tree is expected to bring against the time that it takes, and learns from every step.
Time is counted in target passes over a single node, so plain decoding makes one token per unit of time. Tokens and
nodes are those of one row, on average over the batch.

Where the target skips padding, a pass takes as long as its tokens, however they are spread over the rows. Then the
nodes of all rows have one budget: each goes where it is most likely to be accepted. Else all trees get the same size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from math import inf
from statistics import median

from decode import Step
from decode.devices.cost_curve import CostCurve

CHAIN_MEMORY = 0.95  # weight of the acceptance before, per chain
MEMORY = 0.97  # weight of what was learned before, per step
CALIBRATION_WEIGHT = 2.0  # tokens that the proposer's own expectation counts for: few, so that bad drafts end soon
CALIBRATED = 8.0  # drafts of one level that a calibration counts for: a gain of some percent shows after dozens only
DRAFTER_MEMORY = 0.9  # weight of what was learned before, per draft
LEVEL_MEMORY = 0.8  # the same for the depth of trees on a GPU
TREE_SIZES = 8, 64  # nodes of trees whose average cost tells which nodes cannot be worth it; fewer may be free
LEVELS = 32  # drafts whose times count
LEVEL_TIME = 0.05  # of drafting one level, in passes over one node: what an EAGLE-3 head reads next to an 8B model ...
LEVEL_SECONDS = 1e-3  # ... and what its calls take in addition, whatever it reads
FOLLOWED = 0.7  # of right paths, those whose next token is drafted rightly, too
BACKOFF = (4, 8, 16, 32, 64)  # steps without a draft while drafting does not pay
TRIAL_SHARE = 0.01  # of the time, for a drafter that does not pay; the half, the third ... after each such try
# Of the most likely token where other sources know nothing, before a drafter is tried; tries that this counts for.
ADDED, ADDED_WEIGHT = 0.5, 2.0


def choose_fastest(tokens: Sequence[float], times: Sequence[float], rate: float | None = None) -> int:
    """The index of the option that yields most tokens per unit of time; the first of equals.

    tokens, times: what the step yields and takes with each option. rate: tokens per unit of time in the long run; a
    step is then worth its tokens minus rate x time (renewal-reward theorem). None maximizes this step's ratio alone.
    """
    options = list(zip(tokens, times, strict=True))
    worth = [token / time if rate is None else token - rate * time for token, time in options]
    return worth.index(max(worth))


def chain_time(cost: Callable[[float], float], given: int, size: float, accepted: float, p: float) -> float:
    """The time of verifying a chain on a target with a recurrent state, which computes `given` tokens before it.

    If a node is rejected, the next pass computes all that is committed once more. accepted: the draft tokens that
    should be accepted. p: the probability that all are.
    """
    again = 0.0 if size == 1 else (1 - p) * (cost(given + accepted + 2) - cost(1))
    return cost(given + size) + again


class ChainAcceptance:
    """How often a drafted token is right if the one before it is, where that is alike at every depth.

    Leviathan et al. (2023), theorem 3.8. It depends on no token of the draft that it is asked for.
    """

    def __init__(self) -> None:
        self._accepted, self._tried = 2.4, 4.0  # decayed counts; a token counts if its parent was right
        self._last_levels = 0

    def expect(self, levels: int) -> list[float]:
        """The tokens that chains of 1, 2, ... levels should have accepted."""
        rate = self._accepted / self._tried
        return [*accumulate(rate**level for level in range(1, levels + 1))]

    def draft(self, levels: int) -> None:
        """Take in that so many levels are drafted."""
        self._last_levels = levels

    def observe(self, step: Step) -> None:
        """Learn from the last drafts. Call it once a step."""
        for path in step.path[: len(step.stayed)] if self._last_levels else ():
            self._accepted = CHAIN_MEMORY * self._accepted + len(path) - 1
            self._tried = CHAIN_MEMORY * self._tried + min(len(path), self._last_levels)
        self._last_levels = 0


class DrafterWorth:
    """Whether a drafter adds enough to a tree of other sources, learned from what it added (`DraftBudget.find_gain`).

    A drafter adds most where the others know least: where it is `unknown`, by their probabilities, what comes next.
    It is tried in spite of that after pauses, which are longer for prompts that it has not read, and grow while it does
    not pay.
    """

    def __init__(self) -> None:
        self._gain, self._unknown, self._untried = 0.0, ADDED_WEIGHT, ADDED_WEIGHT  # decayed sums, as the others
        self._levels, self._tries = 1.0, 1.0
        self._steps, self._failures = 0, 0  # since the last try; tries that did not pay

    def is_worth_it(self, unknown: float, level: float, node: float, unread: float, room: int) -> bool:
        """Whether to draft in this step, if a level and a node cost as much as so many tokens. Call it once a step.

        unread: what the drafter has to read first, in the time of levels. room: of the answer.
        """
        self._steps += 1
        drafting, reading = level * self._levels / self._tries, level * unread
        gain = self._gain + self._untried * max(ADDED - node, 0.0)
        pays = unknown * gain / self._unknown > drafting + reading / room
        return pays or self._steps * TRIAL_SHARE > (drafting + reading) * (1 + self._failures)

    def learn(self, unknown: float, gain: float, levels: int, level: float) -> None:
        """Take in what a draft of so many levels added, in tokens, without what its levels cost."""
        self._gain, self._unknown = DRAFTER_MEMORY * self._gain + gain, DRAFTER_MEMORY * self._unknown + unknown
        self._untried *= DRAFTER_MEMORY
        self._levels, self._tries = DRAFTER_MEMORY * self._levels + levels, DRAFTER_MEMORY * self._tries + 1
        self._failures = 0 if gain > level * levels else self._failures + 1
        self._steps = 0


class DraftBudget:
    """Chooses the tree sizes that yield most tokens per second in the long run.

    expected_tau: the tau to be expected of trees of 1, 2, ... nodes before anything is learned. usual_level_time: the
    time of drafting one level before it was measured, and where nothing is measured; None: that of a usual head.
    acceptance_ratio: tokens accepted for each that was expected. rate: tokens per unit of time; at least 1, as plain
    decoding is always possible.
    """

    def __init__(self, expected_tau: Sequence[float] = (1.0, inf), usual_level_time: float | None = None) -> None:
        self.expected_tau, self.usual_level_time = expected_tau, usual_level_time
        # The nodes of a tree and its tau, where that was measured.
        self._calibrated = [pair for pair in enumerate(expected_tau[1:], start=2) if pair[1] < inf]
        self.cost = CostCurve((1, 2), (1.0, 2.0))  # until the first batch begins
        self.uses_clock = True  # the target is not deterministic
        # The nodes of a row, on average, that trees grow by at a time: 1 / rows where these share a budget.
        self.unit: float = 1
        self.is_recurrent, self.given = False, 0  # the target keeps a state; see `chain_time`
        self._node_time = 0.0  # the least that each further node of any tree costs on average
        self._least_slopes: dict[float, float] = {}  # by nodes: the least that each further node costs on average
        self._expected_last: float | None = None  # accepted tokens expected of the last tree; None: nothing was drafted
        # Decayed sums over the steps with drafts.
        self._accepted = self._expected = 0.0
        self._steps = self._time = 1.0
        self._weigh()
        self._promising = True
        self._backoff, self._failures = 0, 0
        self._right: list[float] = []  # by level: how probable it was that a path was right down to it
        self._level_seconds: dict[int, deque[float]] = {}  # of the last drafts, by rows
        self._rows = 1

    def renew(self) -> DraftBudget:
        """The same with nothing learned but the time of a level."""
        return DraftBudget(self.expected_tau, self.level_time if self._level_seconds else self.usual_level_time)

    def _weigh(self) -> None:
        """Find the ratio and the rates that follow from the sums. Call it when they change."""
        self.acceptance_ratio = (CALIBRATION_WEIGHT + self._accepted) / (CALIBRATION_WEIGHT + self._expected)
        # In steps with drafts alone. Expected tokens are counted, because accepted ones vary more.
        self._drafting_rate = (self._steps + self.acceptance_ratio * self._expected) / self._time
        self.rate = max(self._drafting_rate, 1.0)

    @property
    def node_cost(self) -> float:
        """The tokens that the time of a further node would bring elsewhere, where nodes cost least."""
        return self.rate * self._node_time

    @property
    def least_worth(self) -> float:
        """The probability below which no node is worth its time, even where nodes cost least."""
        return self.node_cost / self.acceptance_ratio

    def is_worth_more(self, nodes: float, p: float) -> bool:
        """Whether a tree may grow beyond so many nodes: whether any larger size is worth its time, if each further node
        is right with probability `p` at most."""
        if nodes not in self._least_slopes:
            larger = [size for size in (nodes + self.unit, *self.cost.sizes, TREE_SIZES[-1]) if size > nodes]
            base = self.cost(nodes)
            self._least_slopes[nodes] = min((self.cost(size) - base) / (size - nodes) for size in larger)
        return self.acceptance_ratio * p > self.rate * self._least_slopes[nodes]

    @property
    def level_time(self) -> float:
        """The time of drafting one level."""
        if not self.uses_clock or not self._level_seconds:
            calls = LEVEL_SECONDS / self.cost.seconds[0] if self.uses_clock else 0.0
            return LEVEL_TIME + calls if self.usual_level_time is None else self.usual_level_time
        nearest = min(self._level_seconds, key=lambda rows: abs(rows - self._rows))
        return median(self._level_seconds[nearest]) / self.cost.seconds[0]

    def observe(self, step: Step) -> None:
        """Learn from the last tree and follow the batch. Call it once a step, before the other methods."""
        if count := len(step.stayed):
            self.learn(sum(len(path) - 1 for path in step.path[:count]) / count)
        self.uses_clock = not step.target.deterministic
        self._rows = len(step.sequences)
        self.is_recurrent, self.given = step.target.is_recurrent, step.given
        unit = 1 / self._rows if step.target.passes_flat else 1
        if unit != self.unit:
            self.unit, self._least_slopes = unit, {}
        cost = step.target.cost_after(step.sequences)
        if step.is_first or cost is not self.cost:
            self.begin(cost, new_texts=step.is_first)

    def begin(self, cost: CostCurve, new_texts: bool = True) -> None:
        """Start with another batch size, context or correction, by which a pass over n nodes takes `cost(n)`.

        Where `expected_tau` promises no gain, the first draft of a batch is made late, because it reads whole prompts.
        """
        self._weigh()
        if cost is not self.cost:
            self.cost, self._least_slopes = cost, {}
            sizes = [*TREE_SIZES, *(size for size in cost.sizes if TREE_SIZES[0] < size < TREE_SIZES[1])]
            self._node_time = min((cost(nodes) - 1) / (nodes - 1) for nodes in sizes)
        level_time = self.level_time
        promised = [(tau / (time := cost(nodes) + level_time), tau, time) for nodes, tau in self._calibrated]
        rate, tau, time = max(promised, default=(inf, 1.0, 1.0))
        promising = rate > 1
        if self._steps == 1 and promised and promising:  # nothing is learned yet
            self._steps, self._time = CALIBRATED, CALIBRATED * time
            self._accepted = self._expected = CALIBRATED * (tau - 1)
            self._weigh()
        if new_texts or promising > self._promising:
            self._promising = promising
            self._failures, self._backoff = (0, 0) if promising else (len(BACKOFF), BACKOFF[-1])

    def learn(self, accepted: float) -> None:
        """Take in how many tokens of the last tree were accepted."""
        if self._expected_last is None:
            return
        self._accepted = MEMORY * self._accepted + accepted
        self._expected = MEMORY * self._expected + self._expected_last
        self._weigh()
        if self._drafting_rate >= 1:
            self._failures = 0
        else:
            self._backoff = BACKOFF[min(self._failures, len(BACKOFF) - 1)]
            self._failures += 1

    def is_backing_off(self) -> bool:
        """Whether to draft nothing in this step, and so to call `skip`. Call it once a step."""
        if self._backoff == 0:
            return False
        self._backoff -= 1
        return True

    def skip(self) -> None:
        """Take in that nothing is drafted in this step."""
        self._expected_last = None

    def is_worth_a_level(self, right: Iterable[float], rows: int = 1) -> bool:
        """Whether to draft one more level.

        right: of each path's next token, the probability that it is right. Those that are worth the time of a node
        count. rows: that the paths are of; or 1, where they are of an average row.
        """
        gains = (self.acceptance_ratio * p - self.node_cost for p in right)
        return sum(gain for gain in gains if gain > 0) > rows * self.rate * self.level_time

    def choose_depth(self, most: int) -> int:
        """How many levels to draft, at most `most`. For GPUs, which would have to wait for a decision after each level.

        As many as were worth it in the last steps, which `take_levels` has learned from, and one more if all were.
        """
        for level, p in enumerate(self._right[:most], start=1):
            if not self.is_worth_a_level([FOLLOWED * p]):
                return level
        return min(most, len(self._right) + 1) if self._right else most

    def take_levels(self, right: Sequence[float]) -> None:
        """Learn from the last draft, for `choose_depth`: the probabilities that it was right down to level 1, 2, ..."""
        before = self._right[: len(right)]
        self._right = [LEVEL_MEMORY * old + (1 - LEVEL_MEMORY) * new for old, new in zip(before, right, strict=False)]
        self._right += right[len(before) :]

    def take_drafting_time(self, seconds: float, levels: float) -> None:
        """Take in how long it took to draft so many levels, or what takes as long."""
        self._level_seconds.setdefault(self._rows, deque(maxlen=LEVELS)).append(seconds / levels)

    def choose_growth(self, expected: Sequence[float], levels: int) -> int:
        """How often to let trees grow from their roots, by `unit` nodes at a time, if their levels have been drafted.

        expected[n]: the tokens that they should have accepted after growing n times.
        """
        costs = self._find_times(expected, self.unit)
        times = choose_fastest([self.acceptance_ratio * tokens for tokens in expected], costs, self.rate)
        self._take(1 + self.unit * times, expected[times], levels)
        return times

    def find_gain(self, expected: Sequence[float]) -> float:
        """The tokens that the best of these trees should add to a step, less those that its time is worth elsewhere.

        expected: as in `choose_growth`.
        """
        times = self._find_times(expected, self.unit)
        pairs = zip(expected, times, strict=True)
        return max(self.acceptance_ratio * tokens - self.rate * (time - times[0]) for tokens, time in pairs)

    def choose_levels(self, expected: Sequence[float]) -> int:
        """The best number of levels to draft, at least one, each of one node.

        expected[n - 1]: the tokens that n levels should have accepted.
        """
        times = self._find_times([0.0, *expected], 1)[1:]
        costs = [time + level * self.level_time for level, time in enumerate(times, start=1)]
        levels = 1 + choose_fastest([self.acceptance_ratio * tokens for tokens in expected], costs, self.rate)
        self._take(1 + levels, expected[levels - 1], levels)
        return levels

    def _find_times(self, expected: Sequence[float], unit: float) -> list[float]:
        """The times of verifying trees that have grown 0, 1, ... times by `unit` nodes. expected: accepted tokens."""
        sizes = [1 + unit * times for times in range(len(expected))]
        if not self.is_recurrent:
            return [*map(self.cost, sizes)]
        right = [self.acceptance_ratio * tokens for tokens in expected]
        p = [1.0, *(more - less for less, more in pairwise(right))]
        return [chain_time(self.cost, self.given, *each) for each in zip(sizes, right, p, strict=True)]

    def _take(self, nodes: float, expected: float, levels: int) -> None:
        self._expected_last, self._steps = expected, MEMORY * self._steps + 1
        self._time = MEMORY * self._time + self.cost(nodes + self.given) + (levels and levels * self.level_time)
        self._weigh()
