"""Whether a head loads here and fits the target, and what it is worth on a few prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decode import Target, generate
from heads.checkpoint import load_head
from heads.formats.weight_files import read_json
from proposers import HeadProposer, load_proposer
from proposers.calibration import FILE
from scripts.check_folder import Finding

PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "A farmer has 12 hens. Each hen lays 5 eggs a week. How many eggs are that in 4 weeks?",
    "Write a Python function that reverses a list.",
)
NEW_TOKENS = 48
NODES = 16
NOTHING = 1.05  # tau below which guesses are right by chance at best
SHARE = 0.7  # of the tau that the card states


@dataclass(frozen=True)
class Worth:
    """tau: new tokens a forward pass, in trees of `nodes` nodes; expected: by the card, None where it states none."""

    tau: float
    expected: float | None
    nodes: int
    tokens: int


def load_for(folder: Path, target: Target) -> tuple[HeadProposer | None, list[Finding]]:
    """A proposer of the head for this target, or why there is none."""
    try:
        head = load_head(folder, target.dtype, target.vocabulary, target.config.num_hidden_layers)
    except ValueError as error:
        return None, [Finding("error", "draftless", "does-not-load", str(error))]
    try:
        head.check_target(target.config.hidden_size, target.vocabulary, target.config.num_hidden_layers)
    except ValueError as error:
        return None, [Finding("error", "both", "other-target", str(error))]
    try:
        return load_proposer(folder, target, nodes=NODES), []
    except ValueError as error:  # such as a card that cannot be this head's
        return None, [Finding("error", "draftless", "does-not-draft", str(error))]


def measure(folder: Path, target: Target, proposer: HeadProposer) -> Worth:
    """Answer `PROMPTS` greedily with the head of a folder."""
    answers = generate(target, PROMPTS, proposer, max_new_tokens=NEW_TOKENS, nodes=NODES)
    tokens, steps = (sum(getattr(answer.stats, name) for answer in answers) for name in ("tokens", "steps"))
    return Worth(tokens / steps, read_expected(folder), NODES, tokens)


def read_expected(folder: Path) -> float | None:
    """The tau that a head's card states for `NODES` nodes, None where it states none.

    A card that ends before knows no further nodes to add.
    """
    card = folder / FILE
    taus = read_json(card).get("expected_tau") if card.is_file() else None
    return float(taus[:NODES][-1]) if isinstance(taus, list) and taus else None


def judge(worth: Worth) -> list[Finding]:
    """What a tau says of a head."""
    if worth.tau < NOTHING:
        text = (
            f"tau is {worth.tau:.2f}: next to nothing is accepted, as with the wrong layers, another target's head, a "
            "chat template that it was not trained with, or a head that was hardly trained"
        )
        return [Finding("error", "draftless", "accepts-nothing", text)]
    if worth.expected is not None and worth.tau < SHARE * worth.expected:
        text = (
            f"tau is {worth.tau:.2f} and the card states {worth.expected:.2f} at {worth.nodes} nodes; the model, its "
            "template or the config may have changed since"
        )
        return [Finding("warning", "draftless", "accepts-less-than-card", text)]
    return []
