"""Grammars as users give them, and their matchers by llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
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
NAMED = {"properties", "patternProperties", "$defs"}  # parts of a schema with schemas by name
VALUES = {"const", "enum", "default", "examples"}  # and those with values
MOST_KEPT = 64  # compiled grammars of a compiler
STACK = 1 << 29  # bytes of a thread's stack, as far as it is used
MOST_COMPILERS = 8  # of a tokenizer: requests may have end tokens of their own
FORMS = (
    "a JSON schema (a dict, a pydantic model, the Path of a .json file), 'json', a compiled regular expression, a Lark "
    "grammar (text, the Path of a .lark file), a Grammar, or a function that makes a matcher from a request id"
)
AnyGrammar: TypeAlias = Any  # `FORMS`
MakeMatcher: TypeAlias = Callable[[int], Matcher]  # from a request id


@dataclass(frozen=True, eq=False)
class Grammar:
    """What an answer must look like.

    source: a JSON schema (a dict, a pydantic model, or the Path of a .json file); "json", which is any JSON object; a
    compiled regular expression; or a grammar in llguidance's dialect of Lark (text, or the Path of a .lark file).
    JSON is written on one line, with a space after each comma and colon. A pydantic model's answer has its fields only;
    in other schemas "additionalProperties" says so.
    after: the text or token that the grammar begins after, such as "</think>". What is before it is free, but the
    answer cannot end there, and before a text (not a special token) there are no special tokens. None: the grammar
    begins at once.
    rules: the source as a grammar of llguidance.

    Raises TypeError for another source, and ValueError for a file that cannot be read or a schema that is not JSON.
    """

    source: Any
    after: str | int | None = None
    rules: Mapping[str, str | Mapping[str, Any]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", read_source(self.source))
        if isinstance(self.after, bool) or not isinstance(self.after, str | int | None) or self.after == "":
            raise TypeError(f"after is {describe(self.after)}; it is a text or a token id")


def read_source(source: Any) -> dict[str, Any]:
    """A source as a grammar of llguidance. Raises as `Grammar` does."""
    if isinstance(source, Path):  # a text is never one: it may come from a client
        if source.suffix not in (".json", ".lark"):
            raise ValueError(f"{source} is no grammar; a .json file has a JSON schema, and a .lark file a Lark grammar")
        try:
            text = source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the grammar {source} cannot be read: {error}") from error
        if source.suffix == ".lark":
            return {"lark_grammar": text}
        source = parse(text, str(source))
    if hasattr(source, "model_json_schema"):
        source = close(source.model_json_schema())
    if source == "json":
        source = {"type": "object"}
    if isinstance(source, str) and source.lstrip().startswith("{"):
        source = parse(source, "the JSON schema")
    if isinstance(source, Mapping):
        try:
            return {"json_schema": json.loads(json.dumps({"x-guidance": SPACING, **source}))}
        except (TypeError, ValueError) as error:
            raise ValueError(f"the JSON schema is not JSON: {error}") from error
    if isinstance(source, re.Pattern) and isinstance(source.pattern, str):
        if not source.pattern or source.flags & re.ASCII:
            raise ValueError("a regular expression of a grammar is not empty, and its classes are those of Unicode")
        flags = "".join(letter for letter in "imsx" if source.flags & getattr(re, letter.upper()))
        end = "\n" if "x" in flags else ""  # of a comment
        pattern = f"(?{flags}:{source.pattern}{end})" if flags else source.pattern
        return {"lark_grammar": f"start: /{escape_slashes(pattern)}/"}
    if isinstance(source, str):
        return {"lark_grammar": source}
    raise TypeError(f"grammar is {describe(source)}; it is {FORMS}")


def parse(text: str, name: str) -> Any:
    """The value of a JSON text. Raises ValueError, naming it, if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error


def close(schema: Any) -> Any:
    """A pydantic model's schema without fields that the model does not have."""
    if isinstance(schema, list):
        return [close(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: each if name in VALUES else close(each) for name, each in schema.items()}
    for name in NAMED & {*schema}:
        closed[name] = {field: close(each) for field, each in schema[name].items()}
    is_open = "properties" in schema and schema.get("type") == "object"
    return ({"additionalProperties": False} if is_open else {}) | closed


def escape_slashes(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)


def make_matchers(
    grammar: AnyGrammar, tokenizer: Tokenizer | None, vocabulary: int, ends: frozenset[int]
) -> MakeMatcher:
    """What makes a request's matcher, for a model with so many tokens whose answers end at some of them.

    ends: the tokens that may end an answer where the grammar lets it. Raises TypeError or ValueError for what is no
    grammar, and ValueError without llguidance or a fast tokenizer.
    """
    if callable(grammar) and not hasattr(grammar, "model_json_schema"):
        return grammar
    grammar = grammar if isinstance(grammar, Grammar) else Grammar(grammar)
    if tokenizer is None:
        raise ValueError("a grammar needs a tokenizer: Target(model, tokenizer)")
    key = vocabulary, ends, len(tokenizer)
    with _MAKING:
        compilers = _COMPILERS.setdefault(tokenizer, {})
        if key not in compilers:
            while len(compilers) >= MOST_COMPILERS:
                del compilers[next(iter(compilers))]
            compilers[key] = Compiler(tokenizer, vocabulary, ends)
        compiler = compilers[key]
    compiled = compiler.compile(grammar)
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
            if ids[0] in self.tokenizer.eos_tokens:
                raise ValueError(f"after is {after!r}, which ends answers")
            others = ",".join(map(str, [ids[0], *self.tokenizer.eos_tokens]))
            return f"before: <[^{others}]>* <[{ids[0]}]>"
        if any(map(self.tokenizer.is_special_token, ids)):
            raise ValueError(f"after is {after!r}; it is one special token, or text without any")
        return f"before[suffix={json.dumps(after)}]: /(?s:.*)/"

    def _compile_text(self, text: str) -> LLMatcher:
        from llguidance import LLMatcher

        with ThreadPoolExecutor(1) as pool:
            with _STACKING:  # llguidance calls itself for a rule within a rule; an overflow would end the process
                before = threading.stack_size(STACK)
                try:
                    made = pool.submit(LLMatcher, self.tokenizer, text, log_level=0)
                finally:
                    threading.stack_size(before)
            matcher = made.result()
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

    def fork(self) -> LibraryMatcher:
        """A copy: after llguidance's own `rollback`, masks can be wrong (1.9.1)."""
        return LibraryMatcher(self._matcher.deep_copy(), self._vocabulary)

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


# By tokenizer, then by the vocabulary's size, the tokens that end answers, and the tokenizer's size.
_COMPILERS: WeakKeyDictionary[Tokenizer, dict[tuple[int, frozenset[int], int], Compiler]] = WeakKeyDictionary()
_MAKING, _STACKING = Lock(), Lock()
