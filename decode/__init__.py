"""Lossless speculative decoding: one loop and one tree verifier for every proposer."""

from decode.answer import Answer, Chunk
from decode.hf.speculate import speculate
from decode.loop import generate, stream
from decode.models.default_model import default_model
from decode.proposer import PlainProposer, Proposer, Step
from decode.sampling import Sampling
from decode.session import Session, Verdict
from decode.stats import Stats
from decode.target import Target
from decode.tree import Tree

__all__ = [
    "Answer",
    "Chunk",
    "PlainProposer",
    "Proposer",
    "Sampling",
    "Session",
    "Stats",
    "Step",
    "Target",
    "Tree",
    "Verdict",
    "default_model",
    "generate",
    "speculate",
    "stream",
]
