"""What drafting is worth on this machine: tau and speed, each with its trees and with what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode import Proposer, Target, stream
from decode.devices.cost_curve import CostCurve
from decode.requests.answer import Stats

NODES = 16  # of the trees whose tau is reported
DRAFT_WIDTH = 4  # of a draft model's trees
TRIED, NEW_TOKENS = 4, 48  # prompts to draft on, and new tokens of each at most
LEAST_GAIN = 1.02  # less is within the error of the estimate
LEAST_TOKENS = 50  # fewer do not tell


def describe_tau(tau: float, basis: str) -> str:
    """Tau, the mean acceptance length, in trees of `NODES` nodes. basis: what it was measured on."""
    return f"tau {tau:.2f} in trees of {NODES} nodes ({basis})"


def count(number: int, thing: str) -> str:
    """A number of things: "1 prompt", "4 prompts"."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


@dataclass(frozen=True)
class Worth:
    """What trees that are sized by their cost are worth.

    speed: estimated, relative to no drafts, prompts aside. tau: of these trees. tokens, prompts: what that rests on.
    """

    speed: float
    tau: float
    tokens: int
    prompts: int

    def describe(self) -> str:
        basis = f"{count(self.tokens, 'token')} of {count(self.prompts, 'prompt')}"
        if self.tokens < LEAST_TOKENS:
            return f"worth it here: too few tokens to tell ({basis})"
        verdict = "yes" if self.speed >= LEAST_GAIN else "no"
        return (
            f"worth it here: {verdict}, {self.speed:.2f}x the speed without drafts (estimated, not timed: {basis}, "
            f"trees sized by their cost, tau {self.tau:.2f})"
        )


def find_worth(target: Target, proposer: Proposer, prompts: Sequence[str | Sequence[int]]) -> Worth:
    """The worth of a proposer that chooses the sizes of its trees, on the first `TRIED` prompts."""
    target.warm_up()
    stats, answered = Stats(), set[int]()
    for chunk in stream(target, prompts[:TRIED], proposer, batch_size=1, max_new_tokens=NEW_TOKENS, text=False):
        if chunk.request_id in answered:  # the prompt's own step has no draft
            stats.add(chunk.stats)
        answered.add(chunk.request_id)
        if chunk.answer is not None and chunk.answer.error is not None:
            raise ValueError(chunk.answer.error)
    return Worth(estimate_speed(stats, target.cost_curve()), stats.tau, stats.tokens, len(answered))


def estimate_speed(stats: Stats, cost: CostCurve) -> float:
    """Speed relative to no drafts, of steps that drafted.

    Not timed against plain decoding: other work on the machine would decide. Passes count by the cost curve, drafting
    by its share of the same steps' time. What a recurrent state computes once more does not count.
    """
    if not stats.steps:
        return 1.0
    pass_time = cost(1 + stats.nodes / stats.steps)
    drafting = stats.seconds.proposer / (stats.seconds.target + stats.seconds.accept)
    return stats.tau / (pass_time * (1 + drafting))
