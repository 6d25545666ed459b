"""Proposers: ways to draft. Each takes part in the loop of `decode` through `decode.Proposer`."""

from decode import PlainProposer
from proposers.calibration import Calibration, load_calibration
from proposers.draft import DraftProposer
from proposers.draft_budget import DraftBudget
from proposers.eagle import EagleProposer
from proposers.head_proposer import HeadProposer
from proposers.hydra import HydraProposer
from proposers.load import EAGLES, HEAD_PROPOSERS, load_best, load_draft_head, load_proposer
from proposers.lookahead import LookaheadProposer
from proposers.medusa import MedusaProposer
from proposers.merged import MergedProposer, RecyclingProposer, SuffixProposer
from proposers.ngram import NGramProposer
from proposers.sources import AnswerStore, Continuation, Place, Source
from proposers.sources.levels import DraftSource, HeadSource
from proposers.trees.fixed import PUBLISHED

PROPOSERS = {
    "none": PlainProposer,
    "ngram": NGramProposer,
    "suffix": SuffixProposer,
    "recycling": RecyclingProposer,
    "lookahead": LookaheadProposer,
    "merged": MergedProposer,
    "draft": DraftProposer,
    **HEAD_PROPOSERS,
}

__all__ = [
    "EAGLES",
    "HEAD_PROPOSERS",
    "PROPOSERS",
    "PUBLISHED",
    "AnswerStore",
    "Calibration",
    "Continuation",
    "DraftBudget",
    "DraftProposer",
    "DraftSource",
    "EagleProposer",
    "HeadProposer",
    "HeadSource",
    "HydraProposer",
    "LookaheadProposer",
    "MedusaProposer",
    "MergedProposer",
    "NGramProposer",
    "Place",
    "RecyclingProposer",
    "Source",
    "SuffixProposer",
    "load_best",
    "load_calibration",
    "load_draft_head",
    "load_proposer",
]
