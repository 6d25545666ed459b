"""Grammars as users give them, and their matchers by llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor

from decode.grammars.matcher import Matcher
from decode.requests.numbers import describe
from decode.requests.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Fixed, so that more of a document is known in advance, and no answer is an endless run of spaces.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MOST_KEPT = 64  # compiled grammars of a tokenizer
FORMS = (
    "a JSON schema (a dict, a pydantic model, the path of a .json file), 'json', a compiled regular expression, a Lark "
    "grammar (text, the path of a .lark file), a Grammar, or a function that makes a matcher from a request id"
)
AnyGrammar: TypeAlias = Any  # `FORMS`
MakeMatcher: TypeAlias = Callable[[int], Matcher]  # from a request id


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like.

    source: a JSON schema (a dict, a pydantic model, or the path of a .json file); "json", which is any JSON object; a
    compiled regular expression; or a grammar in llguidance's dialect of Lark (text, or the path of a .lark file).
    JSON is written on one line, with a space after each comma and colon. A pydantic model's answer has its fields only;
    in other schemas "additionalProperties" says so.
    after: the text or token that the grammar begins after, such as "</think>". What is before it is free, but the
    answer cannot end there. None: the grammar begins at once.

    Raises TypeError for another source, and ValueError for a file or schema that is not JSON.
    """

    source: Any
    after: str | int | None = None
    rules: Mapping[str, str | Mapping[str, Any]] = field(init=False, repr=False)  # as llguidance names them

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", read_source(self.source))
        if isinstance(self.after, bool) or not isinstance(self.after, str | int | None) or self.after == "":
            raise TypeError(f"after is {describe(self.after)}; it is a text or a token id")


def read_source(source: Any) -> dict[str, Any]:
    """A source as a grammar of llguidance. Raises as `Grammar` does."""
    if isinstance(source, Path) or (isinstance(source, str) and source.endswith((".json", ".lark"))):
        path = Path(source)
        if path.suffix not in (".json", ".lark"):
            raise ValueError(f"{path} is no grammar; a .json file has a JSON schema, and a .lark file a Lark grammar")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".lark":
            return {"lark_grammar": text}
        try:
            source = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
    if hasattr(source, "model_json_schema"):
        source = close(source.model_json_schema())
    if source == "json":
        source = {"type": "object"}
    if isinstance(source, Mapping | bool):
        source = source if isinstance(source, Mapping) else ({} if source else {"not": {}})
        try:
            return {"json_schema": json.loads(json.dumps({**source, "x-guidance": SPACING}))}
        except (TypeError, ValueError) as error:
            raise ValueError(f"the JSON schema is not JSON: {error}") from error
    if isinstance(source, re.Pattern):
        return {"lark_grammar": f"start: /{escape_slashes(source.pattern)}/"}
    if isinstance(source, str):
        return {"lark_grammar": source}
    raise TypeError(f"grammar is {describe(source)}; it is {FORMS}")


def close(schema: Any) -> Any:
    """A pydantic model's schema without fields that the model does not have."""
    if isinstance(schema, list):
        return [close(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    is_open = isinstance(schema.get("properties"), Mapping) and schema.get("type") == "object"
    ends = {"additionalProperties": False} if is_open else {}
    return ends | {name: close(each) for name, each in schema.items()}


def escape_slashes(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)


def make_matchers(
    grammar: AnyGrammar, tokenizer: Tokenizer | None, vocabulary: int, ends: frozenset[int]
) -> MakeMatcher:
    """What makes a request's matcher, for a model with so many tokens whose answers end at some of them.

    Raises TypeError or ValueError for what is no grammar, and ValueError without llguidance or a fast tokenizer.
    """
    if callable(grammar) and not hasattr(grammar, "model_json_schema"):
        return grammar
    grammar = grammar if isinstance(grammar, Grammar) else Grammar(grammar)
    if tokenizer is None:
        raise ValueError("a grammar needs a tokenizer: Target(model, tokenizer)")
    compilers = _COMPILERS.setdefault(tokenizer, {})
    if (vocabulary, ends) not in compilers:
        compilers[vocabulary, ends] = Compiler(tokenizer, vocabulary, ends)
    compiled = compilers[vocabulary, ends].compile(grammar)
    return lambda request_id: LibraryMatcher(compiled.deep_copy(), vocabulary)


class Compiler:
    """Compiles grammars for a tokenizer, each once."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: frozenset[int]) -> None:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ValueError('grammars need llguidance: pip install "draftless[grammar]"') from error
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"grammars need a fast tokenizer; this one is a {type(tokenizer).__name__}")
        try:
            self.tokenizer: LLTokenizer = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(ends) or None)
        except ValueError as error:
            raise ValueError(f"llguidance cannot read this tokenizer: {error}") from error
        self._compile = lru_cache(MOST_KEPT)(self._compile_text)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """The grammar's matcher, to be copied. Raises ValueError for a grammar that llguidance cannot read."""
        rules = [{"name": "answer", **grammar.rules}]
        if grammar.after is not None:
            rules = [{"lark_grammar": f"start: before @answer\n{self._write_before(grammar.after)}"}, *rules]
        return self._compile(json.dumps({"grammars": rules}))

    def _write_before(self, after: str | int) -> str:
        """The rule for what is before the grammar."""
        ids = [after] if isinstance(after, int) else self.tokenizer.tokenize_str(after, parse_special=True)
        if isinstance(after, int) or (len(ids) == 1 and self.tokenizer.is_special_token(ids[0])):
            return f"before: /(?s:.*)/ <[{ids[0]}]>"
        return f"before[suffix={json.dumps(after)}]: /(?s:.*)/"

    def _compile_text(self, text: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self.tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be read: {matcher.get_error().strip()}")
        return matcher


class LibraryMatcher:
    """llguidance's matcher as a `Matcher`. Raises ValueError where its grammar gets too complex."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def accept(self, token: int) -> bool:
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return taken

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def find_allowed(self) -> Tensor:
        bits = numpy.frombuffer(self._matcher.compute_bitmask(), dtype=numpy.uint8)
        self._check()
        bools = numpy.unpackbits(bits, count=self._vocabulary, bitorder="little")
        return torch.from_numpy(bools).view(torch.bool)

    def find_forced(self) -> Sequence[int]:
        return self._matcher.compute_ff_tokens()

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar failed: {self._matcher.get_error().strip()}")


# By tokenizer, then by the vocabulary's size and the tokens that end answers.
_COMPILERS: WeakKeyDictionary[Tokenizer, dict[tuple[int, frozenset[int]], Compiler]] = WeakKeyDictionary()
