"""Ways to draft. Each takes part in the loop of `decode` through `decode.Proposer`."""

from decode import Plain
from proposers.draft import DraftProposer
from proposers.eagle import EagleProposer
from proposers.head_proposer import TrainedProposer
from proposers.hydra import HydraProposer
from proposers.load import TRAINED, load_best, load_proposer
from proposers.medusa import MedusaProposer
from proposers.ngram import NGramProposer

PROPOSERS = {"none": Plain, "ngram": NGramProposer, "draft": DraftProposer, **TRAINED}

__all__ = [
    "PROPOSERS",
    "TRAINED",
    "DraftProposer",
    "EagleProposer",
    "HydraProposer",
    "MedusaProposer",
    "NGramProposer",
    "TrainedProposer",
    "load_best",
    "load_proposer",
]
