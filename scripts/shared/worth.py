"""What drafting is worth on this machine: tau and speed, each with its trees and with what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode import Proposer, Target, generate
from decode.stats import Stats

NODES = 16  # of the trees whose tau is reported
TIMED, NEW_TOKENS, WARM_UP = 4, 48, 8  # prompts to time; new tokens of each at most, and of an answer that is not timed
LEAST_GAIN = 1.02  # less is what two runs differ by


def describe_tau(tau: float, basis: str) -> str:
    """Tau, the mean acceptance length, in trees of `NODES` nodes. basis: what it was measured on."""
    return f"tau {tau:.2f} in trees of {NODES} nodes ({basis})"


def count(number: int, thing: str) -> str:
    """A number of things: "1 prompt", "4 prompts"."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


@dataclass(frozen=True)
class Worth:
    """Decoding with drafts in trees that are sized by their cost, timed against decoding without.

    speed: relative to no drafts. tau: of these trees. tokens, prompts: how many were timed.
    """

    speed: float
    tau: float
    tokens: int
    prompts: int

    def describe(self) -> str:
        verdict = "yes" if self.speed >= LEAST_GAIN else "no"
        basis = f"timed: {count(self.tokens, 'token')} of {count(self.prompts, 'prompt')}"
        trees = f"in trees sized by their cost, tau {self.tau:.2f}"
        return f"worth it here: {verdict}, {self.speed:.2f} of the speed without drafts {trees} ({basis})"


def time_drafts(target: Target, proposer: Proposer, prompts: Sequence[str | Sequence[int]]) -> Worth:
    """The worth of a proposer that chooses the sizes of its trees, on the first `TIMED` prompts.

    Both ways answer a prompt before the next one is asked, in turns, so that changes on the machine affect both alike.
    """
    target.warm_up()
    stats = {drafting: Stats() for drafting in (False, True)}
    for drafting in stats:
        generate(target, prompts[:1], proposer if drafting else None, max_new_tokens=WARM_UP)
    for number, prompt in enumerate(prompts[:TIMED]):
        for drafting in sorted(stats, reverse=number % 2 == 1):
            (answer,) = generate(target, [prompt], proposer if drafting else None, max_new_tokens=NEW_TOKENS)
            stats[drafting].add(answer.stats)
    drafted, plain = stats[True], stats[False]
    speed = drafted.tokens_per_second / plain.tokens_per_second
    return Worth(speed, drafted.tau, drafted.tokens, len(prompts[:TIMED]))
