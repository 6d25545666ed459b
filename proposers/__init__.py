"""Ways to draft. Each takes part in the loop of `decode` through `decode.Proposer`."""

from decode import Plain
from proposers.draft import DraftProposer
from proposers.ngram import NGramProposer

PROPOSERS = {"none": Plain, "ngram": NGramProposer, "draft": DraftProposer}

__all__ = ["PROPOSERS", "DraftProposer", "NGramProposer"]
