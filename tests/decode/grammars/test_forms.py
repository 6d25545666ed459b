"""Grammars as users give them: all their forms, which of them are refused, and when they are compiled."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from gc import collect
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from weakref import ref

import pytest

from decode import Engine, Grammar, Target, generate, stream
from decode.grammars import grammar as grammars
from decode.grammars.grammar import read_source
from tests.support.grammars import PERSON, SumMatcher, encode, make_matcher, make_target, replay
from tests.support.models import VOCABULARY
from tests.support.tokenizers import byte_level


def refuse(grammar: Any, kind: type[Exception], message: str, target: Target | None = None) -> None:
    """Before any work: `stream` raises when it is called, and an engine goes on."""
    target = target or make_target()
    with pytest.raises(kind, match=message):
        stream(target, [[5, 9]], None, grammar=grammar)
    engine = Engine(target, None)
    running = engine.add([5, 9], max_new_tokens=3)
    with pytest.raises(kind, match=message):
        engine.add([5, 9], grammar=grammar)
    assert [*engine] and running.answer is not None and len(running.answer.tokens) == 3


UNREADABLE = "(?s)the grammar cannot be read: .*"


@pytest.mark.parametrize(
    ("grammar", "kind", "message"),
    [
        (3, TypeError, r"grammar is 3 \(int\); it is a JSON schema \(a dict, .*a compiled regular expression.*Lark"),
        (["green"], TypeError, r"grammar is \['green'\] \(list\)"),
        (b"start: A", TypeError, r"\(bytes\); it is a JSON schema"),
        (SumMatcher(VOCABULARY), TypeError, r"\(SumMatcher\); it is .* a function that makes a matcher"),
        (re.compile(rb"a"), TypeError, "grammar is"),
        ({"properties": {"a": {1, 2}}}, ValueError, "the JSON schema is not JSON: .*set"),
        ({"type": "nope"}, ValueError, f"{UNREADABLE}nope"),
        ({"type": "string", "pattern": "(?=a)"}, ValueError, f"{UNREADABLE}look-around"),
        (re.compile(r"(?=a)b"), ValueError, f"{UNREADABLE}look-around"),
        (re.compile(r"(a)\1"), ValueError, f"{UNREADABLE}backreferences"),
        ("start: missing", ValueError, f"{UNREADABLE}missing"),
        ("a text that is no grammar", ValueError, UNREADABLE),
        ('start: "a', ValueError, UNREADABLE),
        (Grammar(PERSON, after=100_000), ValueError, f"{UNREADABLE}100000"),
        (Grammar(PERSON, after="</think>\n\n"), ValueError, "after"),  # a special token and more
    ],
)
def test_what_is_no_grammar_is_refused(grammar: Any, kind: type[Exception], message: str) -> None:
    refuse(grammar, kind, message)


@pytest.mark.parametrize("after", ["", True, 0.5, ["a"]])
def test_what_a_grammar_begins_after_is_a_text_or_a_token(after: Any) -> None:
    with pytest.raises(TypeError, match=r"after is .*; it is a text or a token id"):
        Grammar(PERSON, after=after)


def test_files_hold_schemas_and_grammars(tmp_path: Path) -> None:
    schema, lark, broken, other = (tmp_path / name for name in ("a.json", "a.lark", "b.json", "a.txt"))
    schema.write_text('{"enum": ["grün"]}', encoding="utf-8")
    lark.write_text('start: "green"', encoding="utf-8")
    broken.write_text("{enum", encoding="utf-8")
    assert read_source(schema) == read_source({"enum": ["grün"]})
    assert read_source(lark) == {"lark_grammar": 'start: "green"'}
    assert read_source(str(schema)) == {"lark_grammar": str(schema)}  # a client's text is no path
    with pytest.raises(ValueError, match=r"b\.json is not JSON"):
        Grammar(broken)
    with pytest.raises(ValueError, match=r"a\.txt is no grammar; a \.json file has a JSON schema"):
        Grammar(other)


def test_a_file_that_is_missing_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.json"):
        Grammar(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(re.compile("ab", re.I), "aB"), (re.compile("a.b", re.S), "a\nb"), (re.compile("a b", re.X), "ab")],
)
def test_the_flags_of_a_regular_expression_count(pattern: re.Pattern[str], text: str) -> None:
    assert replay(make_matcher(pattern), encode(text)).is_complete


@pytest.mark.parametrize("text", ["a/b", "a\\/b", r"x\d/[/]/y", "a\nb"])
def test_a_regular_expression_may_have_slashes(text: str) -> None:
    pattern, example = re.compile(text), text.replace("\\/", "/").replace(r"\d", "7").replace("[/]", "/")
    assert pattern.fullmatch(example) and replay(make_matcher(pattern), encode(example)).is_complete


def test_a_pydantic_model_is_its_schema_without_other_fields() -> None:
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Place", row=(int, ...))
    model = pydantic.create_model("Fruit", name=(str, ...), places=(list[inner], ...), more=(dict[str, int], {}))
    schema, closed = model.model_json_schema(), {"additionalProperties": False}
    schema["$defs"]["Place"] |= closed
    assert read_source(model) == read_source(Grammar(model).source) == read_source(schema | closed)


def test_json_is_any_object_on_one_line() -> None:
    make = make_matcher("json")
    assert replay(make, encode('{"a": [1, {"b": null}], "c": "d"}')).is_complete
    for text in ('{"a":1}', '{ "a": 1}', "[1]", "3", '{"a": 1 }', "\n{}"):
        with pytest.raises(AssertionError, match="is forbidden"):
            replay(make, encode(text))


def test_a_grammar_needs_a_fast_tokenizer(target: Target) -> None:
    refuse(PERSON, ValueError, r"a grammar needs a tokenizer: Target\(model, tokenizer\)", target)
    slow = copy(target)
    slow.tokenizer = MagicMock(is_fast=False, chat_template=None)
    with pytest.raises(ValueError, match="grammars need a fast tokenizer; this one is a MagicMock"):
        stream(slow, [[5, 9]], None, grammar=PERSON, text=False)


def test_a_grammar_needs_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    monkeypatch.setattr(grammars, "_COMPILERS", {})
    refuse(PERSON, ValueError, r'grammars need llguidance: pip install "draftless\[grammar\]"')


def test_a_matcher_of_ones_own_needs_no_tokenizer(target: Target) -> None:
    assert target.tokenizer is None
    (answer,) = generate(target, [[5, 9]], "merged", grammar=lambda each: SumMatcher(VOCABULARY, size=3))
    assert (len(answer.tokens), answer.finish) == (3, "grammar")


# Grammars are compiled once, in the thread that adds the request.


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_COMPILERS", {})
    compiled, compile_text = list[str](), grammars.Compiler._compile_text

    def count(compiler: grammars.Compiler, text: str) -> Any:
        compiled.append(text)
        return compile_text(compiler, text)

    monkeypatch.setattr(grammars.Compiler, "_compile_text", count)
    for each in (PERSON, dict(PERSON), Grammar(PERSON), Grammar(PERSON, after="#"), {"enum": ["green"]}, PERSON):
        make_matcher(each)
    assert len(compiled) == 3


def test_many_threads_add_requests_with_grammars_and_drive_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_COMPILERS", {})
    engine, words = Engine(make_target(), "merged", rows=4), [f"green {place % 6}" for place in range(24)]

    def ask(word: str) -> str:
        grammar = {"enum": [word, f"{word}!"]}
        return "".join(chunk.text for chunk in engine.add(encode("a green "), grammar=grammar, max_new_tokens=20))

    with ThreadPoolExecutor(8) as pool:
        texts = [*pool.map(ask, words)]
    assert all(text in (f'"{word}"', f'"{word}!"') for text, word in zip(texts, words, strict=True))


def test_tokens_that_are_added_to_a_tokenizer_count() -> None:
    tokenizer = byte_level(["green"])
    target = SimpleNamespace(tokenizer=tokenizer, vocabulary=len(tokenizer) + 7, stop_ids=frozenset([1]))
    make_matcher(PERSON, target)  # type: ignore[arg-type]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<go>"]})
    matcher = make_matcher(Grammar(PERSON, after="<go>"), target)(0)  # type: ignore[arg-type]
    assert bool(matcher.find_allowed()[len(tokenizer) - 1])


def test_a_tokenizer_that_is_gone_leaves_nothing() -> None:
    tokenizer = byte_level(["green"])
    target, gone = (
        SimpleNamespace(tokenizer=tokenizer, vocabulary=len(tokenizer), stop_ids=frozenset([1])),
        ref(tokenizer),
    )
    make = make_matcher({"enum": ["green"]}, target)  # type: ignore[arg-type]
    assert make(0).find_forced() and tokenizer in grammars._COMPILERS
    del target, tokenizer
    collect()
    assert gone() is None and make(0).find_forced()
