"""Proposers: ways to draft. Each takes part in the loop of `decode` through `decode.Proposer`."""

from decode import PlainProposer
from proposers.calibration import Calibration, load_calibration
from proposers.draft import DraftProposer
from proposers.draft_budget import DraftBudget
from proposers.eagle import EagleProposer
from proposers.fixed_trees import PUBLISHED
from proposers.head_proposer import HeadProposer
from proposers.hydra import HydraProposer
from proposers.load import EAGLES, HEAD_PROPOSERS, load_best, load_draft_head, load_proposer
from proposers.lookahead import LookaheadProposer
from proposers.medusa import MedusaProposer
from proposers.ngram import NGramProposer

PROPOSERS = {
    "none": PlainProposer,
    "ngram": NGramProposer,
    "lookahead": LookaheadProposer,
    "draft": DraftProposer,
    **HEAD_PROPOSERS,
}

__all__ = [
    "EAGLES",
    "HEAD_PROPOSERS",
    "PROPOSERS",
    "PUBLISHED",
    "Calibration",
    "DraftBudget",
    "DraftProposer",
    "EagleProposer",
    "HeadProposer",
    "HydraProposer",
    "LookaheadProposer",
    "MedusaProposer",
    "NGramProposer",
    "load_best",
    "load_calibration",
    "load_draft_head",
    "load_proposer",
]
