"""Lossless speculative decoding: one loop and one tree verifier for every proposer."""

from decode.engine import Engine
from decode.grammars.grammar import Grammar
from decode.grammars.matcher import Matcher
from decode.hf.speculate import speculate
from decode.models.default_model import default_model
from decode.proposer import PlainProposer, Proposer, Step
from decode.request import Request
from decode.requests.answer import Answer, Chunk, Stats
from decode.session import Session, Verdict
from decode.stream import generate, stream
from decode.target import Target
from decode.trees.sampling import Sampling
from decode.trees.tree import Tree

__all__ = [
    "Answer",
    "Chunk",
    "Engine",
    "Grammar",
    "Matcher",
    "PlainProposer",
    "Proposer",
    "Request",
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
