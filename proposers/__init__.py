"""Proposers: ways to draft. Each takes part in the loop of `decode` through `decode.Proposer`."""

from proposers.calibration import Calibration, load_calibration
from proposers.dflash import DFlashProposer, FlashMapProposer
from proposers.draft_budget import DraftBudget
from proposers.draft_models.loading import load_draft_model
from proposers.draft_models.proposer import DraftProposer
from proposers.draft_models.staged import StagedProposer
from proposers.eagle import EagleProposer, JumpProposer, PEagleProposer
from proposers.head_proposer import HeadProposer
from proposers.load import load_draft_head, load_proposer
from proposers.medusa import HydraProposer, MedusaProposer, MultiTokenProposer
from proposers.merged import MergedProposer
from proposers.ngram import NGramProposer
from proposers.options import HEAD_PROPOSERS, check_options, load_kind
from proposers.sources import AnswerStore, Continuation, Place, Source
from proposers.tree_proposer import TreeProposer

__all__ = [
    "HEAD_PROPOSERS",
    "AnswerStore",
    "Calibration",
    "Continuation",
    "DFlashProposer",
    "DraftBudget",
    "DraftProposer",
    "EagleProposer",
    "FlashMapProposer",
    "HeadProposer",
    "HydraProposer",
    "JumpProposer",
    "MedusaProposer",
    "MergedProposer",
    "MultiTokenProposer",
    "NGramProposer",
    "PEagleProposer",
    "Place",
    "Source",
    "StagedProposer",
    "TreeProposer",
    "check_options",
    "load_calibration",
    "load_draft_head",
    "load_draft_model",
    "load_kind",
    "load_proposer",
]
