"""The names of bench.py's methods, and what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from proposers import HEAD_PROPOSERS, PROPOSERS
from proposers.head_proposer import TREES
from proposers.load import EAGLES
from proposers.sources import SOURCES
from scripts.shared.options import ProposerOptions

LOOKUP = "prompt-lookup"
LOOKUP_LENGTH = 10  # draft tokens, as in transformers
KINDS = (*PROPOSERS, LOOKUP, "auto")
GROWN = ("suffix", "recycling", "merged")
FIXED = ("ngram", LOOKUP)  # proposers whose sizes are no options of `load_proposer`
SIZED = ("ngram", *GROWN)
HEADS, CHAINS = ", ".join(HEAD_PROPOSERS), ", ".join(EAGLES)
METHODS_HELP = f"""comma-separated, of {", ".join(KINDS)}; none is always added. {", ".join(SIZED)} and
heads take a number of nodes, root included: merged-16. {HEADS} take a tree: hydra-static-64, and sampled draft tokens:
hydra-sampled-16. {CHAINS} take a chain of draft tokens: eagle3-chain-5. merged takes a head: merged-hydra-16, and
leaves out a source: merged-without-suffix-16. merged-warm-16 drafts from the answers to earlier questions too, and
needs --repeats 1. {LOOKUP}-5 drafts 5 tokens, the same as transformers' prompt_lookup_num_tokens=5 (default: all that
have a model, but not {LOOKUP})"""


@dataclass(frozen=True)
class NamedMethod:
    """A proposer and what is special to its measurement.

    nodes: the size of every tree, root included; None leaves it to the proposer. without: the name of a source of
    merged that is left out. keeps_answers: whether the answers to earlier questions are drafted from.
    """

    kind: str
    options: ProposerOptions
    nodes: int | None = None
    without: str | None = None
    keeps_answers: bool = False


def parse_method(name: str) -> NamedMethod:
    """What a method's name stands for. A head's folder and a draft model are still to be named.

    "hydra" chooses its number of nodes, "hydra-16" has trees of 16 nodes, "hydra-static-16" has 16 nodes of the static
    tree, "hydra-sampled-16" samples its draft tokens, "eagle3-chain-5" drafts a chain of 5, "prompt-lookup-5" copies
    5 tokens. "merged-warm-without-suffix-hydra-16" has all that merged can have. Raises ValueError for other names.
    """
    kind = next((kind for kind in KINDS if f"{name}-".startswith(f"{kind}-")), None)
    if kind is None:
        raise ValueError(f"unknown method {name!r}; choose from {', '.join(KINDS)}")
    words = name.removeprefix(kind).split("-")[1:]
    number = int(words.pop()) if words and words[-1].isdecimal() else None
    if number == 0 or (kind == "ngram" and number == 1):
        _refuse(name)
    if kind in FIXED and not words:
        nodes = 1 + (number or LOOKUP_LENGTH) if kind == LOOKUP else number
        return NamedMethod(kind, ProposerOptions("ngram" if kind == LOOKUP else kind), nodes)
    if kind in GROWN:
        return _parse_grown(name, kind, words, number)
    if kind in HEAD_PROPOSERS:
        return _parse_head(name, kind, words, number)
    if name != kind:
        _refuse(name)
    return NamedMethod(kind, ProposerOptions(kind))


def _parse_grown(name: str, kind: str, words: list[str], nodes: int | None) -> NamedMethod:
    keeps_answers, without, head = False, None, None
    if kind == "merged":
        if words[:1] == ["warm"]:
            keeps_answers, words = True, words[1:]
        if words[:1] == ["without"] and words[1:2] and words[1] in SOURCES:
            without, words = words[1], words[2:]
        if words and words[0] in HEAD_PROPOSERS:
            head, words = words[0], words[1:]
    if words:
        _refuse(name)
    return NamedMethod(kind, ProposerOptions(kind, nodes=nodes, head=head), nodes, without, keeps_answers)


def _parse_head(name: str, kind: str, words: list[str], number: int | None) -> NamedMethod:
    sampled = words[:1] == ["sampled"]
    words = words[sampled:]
    if words == ["chain"] and kind in EAGLES and number:
        chain = ProposerOptions(kind, width=1, depth=number, nodes=1 + number, sampled=sampled)
        return NamedMethod(kind, chain, chain.nodes)
    tree = words.pop() if words else None
    if words or tree not in (None, *TREES):
        _refuse(name)
    return NamedMethod(kind, ProposerOptions(kind, tree=tree, nodes=number, sampled=sampled), number)


def _refuse(name: str) -> NoReturn:
    raise ValueError(
        f"unknown method {name!r}; numbers of nodes are for {', '.join(SIZED)}, {HEADS}, as in merged-16 (ngram: from "
        f"2 on); trees for heads, as in hydra-static-16, with one of {', '.join(TREES)}; sampled draft tokens for "
        f"heads, as in hydra-sampled-16; chains for {CHAINS}, as in eagle3-chain-5; draft tokens for {LOOKUP}; "
        "merged-hydra-16 has a head, merged-warm-16 keeps answers, merged-without-suffix-16 leaves out a source, "
        f"one of {', '.join(SOURCES)}"
    )
