"""Ways to draft. Each takes part in the loop of `decode` through `decode.Proposer`."""

from decode import PlainProposer
from proposers.draft import DraftProposer
from proposers.eagle import EagleProposer
from proposers.head_proposer import HeadProposer
from proposers.hydra import HydraProposer
from proposers.load import HEAD_PROPOSERS, load_best, load_proposer
from proposers.medusa import MedusaProposer
from proposers.ngram import NGramProposer

PROPOSERS = {"none": PlainProposer, "ngram": NGramProposer, "draft": DraftProposer, **HEAD_PROPOSERS}

__all__ = [
    "HEAD_PROPOSERS",
    "PROPOSERS",
    "DraftProposer",
    "EagleProposer",
    "HeadProposer",
    "HydraProposer",
    "MedusaProposer",
    "NGramProposer",
    "load_best",
    "load_proposer",
]
