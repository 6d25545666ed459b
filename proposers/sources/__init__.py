"""Sources: ways to continue a text, which `MergedProposer` grows one draft tree from."""

from collections.abc import Callable

from proposers.sources.answer_store import AnswerStore, StoredSource
from proposers.sources.grammar import GrammarSource
from proposers.sources.recycling import RecyclingSource
from proposers.sources.source import Continuation, Place, Source
from proposers.sources.suffix import SuffixAutomaton, SuffixSource

SOURCES: dict[str, Callable[[], Source]] = {  # those that need no training, by name
    "suffix": SuffixSource,
    "recycling": RecyclingSource,
    "grammar": GrammarSource,
}

__all__ = [
    "SOURCES",
    "AnswerStore",
    "Continuation",
    "GrammarSource",
    "Place",
    "RecyclingSource",
    "Source",
    "StoredSource",
    "SuffixAutomaton",
    "SuffixSource",
]
