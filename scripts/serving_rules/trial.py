"""A decode trial: does a head load here, does it fit the target, and how many of its draft tokens are accepted?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from decode import Target, generate
from heads.checkpoint import load_head
from proposers import HeadProposer, load_proposer
from proposers.calibration import FILE, load_calibration
from scripts.serving_rules.folder import Finding, error, warning

PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "A farmer has 12 hens. Each hen lays 5 eggs a week. How many eggs are that in 4 weeks?",
    "Write a Python function that reverses a list.",
)
NEW_TOKENS = 48
NODES = 16
USELESS_TAU = 1.05  # below it, draft tokens are right by chance at best
EXPECTED_SHARE = 0.7  # least share of the tau that the calibration expects


@dataclass(frozen=True)
class TrialResult:
    """tau, the mean acceptance length, in trees of `nodes` nodes; and the tau that the calibration expects, if any."""

    tau: float
    expected: float | None
    nodes: int
    tokens: int

    def describe(self) -> str:
        expected = "no expected tau" if self.expected is None else f"an expected tau of {self.expected:.2f}"
        return f"tau {self.tau:.2f} over {self.tokens} tokens, greedy, {self.nodes} nodes; {FILE} states {expected}"

    def check(self) -> Iterator[Finding]:
        """What is wrong with this tau."""
        if self.tau < USELESS_TAU:
            text = (
                f"tau is {self.tau:.2f}, so almost no draft token is accepted. Possible reasons: little training, "
                "other layers, another target's head, another chat template"
            )
            yield error("draftless", "accepts-nothing", text)
        elif self.expected is not None and self.tau < EXPECTED_SHARE * self.expected:
            text = (
                f"tau is {self.tau:.2f}, but {FILE} states {self.expected:.2f} for {self.nodes} nodes. The target, its "
                "chat template or the head may have changed since; if so, calibrate again"
            )
            yield warning("draftless", "accepts-less-than-card", text)


def load_trial_proposer(folder: Path, target: Target) -> tuple[HeadProposer | None, list[Finding]]:
    """A proposer for this target with the head of a folder; or None, and the reason."""
    sizes = target.vocabulary, target.config.num_hidden_layers
    try:
        fault = "draftless", "does-not-load"
        head = load_head(folder, target.dtype, *sizes)
        fault = "both", "other-target"
        head.check_target(target.config.hidden_size, *sizes)
        fault = "draftless", "does-not-draft"  # because of another head's calibration, for example
        return load_proposer(folder, target, nodes=NODES), []
    except ValueError as reason:
        return None, [error(*fault, str(reason))]


def run_trial(folder: Path, target: Target, proposer: HeadProposer) -> TrialResult:
    """Answer `PROMPTS` greedily with the head of a folder."""
    answers = generate(target, PROMPTS, proposer, max_new_tokens=NEW_TOKENS, nodes=NODES)
    tokens, steps = (sum(getattr(answer.stats, name) for answer in answers) for name in ("tokens", "steps"))
    calibration = load_calibration(folder)
    expected = calibration.expect_tau(NODES)[-1] if calibration else None
    return TrialResult(tokens / steps, expected, NODES, tokens)
