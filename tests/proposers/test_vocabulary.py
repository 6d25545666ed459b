"""Drafting with another tokenizer: the map by bytes, texts that are carried over, and the target's text."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast, RepetitionPenaltyLogitsProcessor

from decode import Sampling, Target, generate
from proposers import DraftProposer, MergedProposer
from proposers.draft_models.retokenized import Branches
from proposers.draft_models.texts import ReadTexts
from proposers.draft_models.vocabulary import DraftText, VocabularyMap, read_bytes
from proposers.search import DraftToken
from tests.support.drafting import Recorder
from tests.support.enumeration import (
    EXACT,
    WRONG,
    Chain,
    Distributions,
    Prefix,
    Randomness,
    compare_third_tokens,
    emit,
    measure_error,
)
from tests.support.models import tiny
from tests.support.reference_rules import in_use
from tests.support.tokenizers import byte_level, merging, sentence_piece

LETTERS = ["a", " ", "the", "\t", "\n\n", "\xe9", "\u2013", "<s>", "def f(x):\n    return"]
LETTERS += ["\u0645\u0631\u062d\u0628\u0627", "\u4f60\u597d", "\u65e5"]  # Arabic, Chinese
LETTERS += ["\U0001f642", "\U0001f469\u200d\U0001f467", "\U0001d4b3"]  # of 4 bytes, one of them joined to another
KINDS = {"byte level": byte_level, "SentencePiece": sentence_piece}


def read_back(tokenizer: Any, ids: list[int]) -> bytes:
    bytes_of = read_bytes(tokenizer)
    return b"".join(bytes_of[token] for token in ids)


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_texts_survive_the_map(draft: str, target: str) -> None:
    """500 texts of characters of 1 to 4 bytes, cut anywhere, token by token: no byte is lost, no id ever changes."""
    ours, theirs = KINDS[draft]([" the", "你", "return"]), KINDS[target]([" the", "é", "🙂"])
    vocabulary, draw = VocabularyMap(ours, theirs, len(ours), len(theirs)), random.Random(0)
    for _ in range(500):
        text = "".join(draw.choice(LETTERS) for _ in range(draw.randint(1, 12)))
        tokens = (
            VocabularyMap(theirs, ours, len(theirs), len(ours)).encode(text.encode()) if draw.random() < 0.5 else []
        )
        tokens = tokens or theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        whole, written, before = read_back(theirs, tokens), DraftText(vocabulary), list[int]()
        for end in range(draw.randint(1, len(tokens)), len(tokens) + 1):
            ids = written.follow(tokens[:end])
            assert ids[: len(before)] == before
            before = [*ids]
        assert read_back(ours, written.ids) == whole and whole == text.encode()


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_the_shared_tokens_are_those_with_equal_bytes(draft: str, target: str) -> None:
    """Compared with all pairs. Special tokens correspond by what they are for; of equal ones the first counts."""
    ours, theirs = KINDS[draft]([" the", "xy", "你"]), KINDS[target]([" the", "你", "no"])
    size = len(theirs) - 1  # the last token is padding
    vocabulary = VocabularyMap(ours, theirs, len(ours), size)
    draft_bytes, target_bytes = read_bytes(ours), read_bytes(theirs)
    expected = {ours.eos_token_id: theirs.eos_token_id, ours.bos_token_id: theirs.bos_token_id}
    for data in {*draft_bytes.values()} & {target_bytes[token] for token in target_bytes if token < size}:
        one, other = (min(token for token in each if each[token] == data) for each in (draft_bytes, target_bytes))
        expected[one] = other
    found = dict(zip(vocabulary.draft_ids.tolist(), vocabulary.target_ids.tolist(), strict=True))
    assert found == expected and len({*found.values()}) == len(found)
    assert vocabulary.target_ids.tolist() == sorted(vocabulary.target_ids.tolist())


def test_a_tokenizer_without_known_bytes_is_refused() -> None:
    backend = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    pieces = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(ValueError, match="a WordPiece tokenizer does not tell the bytes of its tokens"):
        read_bytes(pieces)


def test_a_text_has_a_token_in_any_case() -> None:
    """Also the beginning of a character alone, and a special token that the draft does not have."""
    ours, theirs = byte_level(["ab"]), byte_level(["ab"])
    theirs.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    vocabulary = VocabularyMap(ours, theirs, len(ours), len(theirs))
    for token in (theirs.convert_tokens_to_ids("<turn>"), vocabulary.encode("\u4f60".encode()[:1])[0]):
        assert len(DraftText(vocabulary).follow([token])) == 1


def make_pair(draft: str, target: str, **settings: Any) -> tuple[Target, Target]:
    """A draft and a target with tokenizers of their own. Equal weights would be of no use: ids differ."""
    ours, theirs = KINDS[draft](["ab", "你"]), KINDS[target](["ab", "cd"])
    return (
        Target(tiny("llama", vocab_size=len(ours) + 3, seed=1), ours),
        Target(tiny("llama", vocab_size=len(theirs), **settings), theirs),
    )


@pytest.mark.parametrize(("draft", "target"), [("byte level", "SentencePiece"), ("SentencePiece", "byte level")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_targets(draft: str, target: str, temperature: float) -> None:
    """Alone and in batches, whose rows accept different lengths; drafts know the noise of sampled text."""
    small, large = make_pair(draft, target)
    draw = random.Random(0)
    prompts = [[draw.randrange(2, large.vocabulary) for _ in range(size)] for size in (3, 9, 1)]
    settings: dict[str, Any] = {"sampling": Sampling(temperature, seed=2), "max_new_tokens": 20, "stop_ids": ()}
    expected = [answer.tokens for answer in generate(large, prompts, None, **settings)]
    for proposer in (
        DraftProposer(small, depth=3, nodes=4),
        DraftProposer(small, width=2, depth=3, nodes=8),
        MergedProposer(drafter=DraftProposer(small, width=2, depth=2)),
    ):
        for batch_size in (1, 3):
            found = generate(large, prompts, proposer, batch_size=batch_size, **settings)
            assert [answer.tokens for answer in found] == expected


def test_a_recurrent_draft_may_have_another_tokenizer() -> None:
    ours, theirs = byte_level(["ab"]), sentence_piece(["ab"])
    small = Target(tiny("lfm2", vocab_size=len(ours)), ours)
    large = Target(tiny("llama", vocab_size=len(theirs)), theirs)
    prompts = [[260, 300, 310, 305], [290, 300]]
    expected = [answer.tokens for answer in generate(large, prompts, None, max_new_tokens=12, stop_ids=())]
    found = generate(large, prompts, DraftProposer(small, depth=2, nodes=3), max_new_tokens=12, stop_ids=())
    assert [answer.tokens for answer in found] == expected


def test_tokens_are_drafted_that_the_draft_does_not_have() -> None:
    """Its text is cut into the target's tokens. Logits processors of transformers see tokens that both have."""
    small, large = make_pair("byte level", "SentencePiece")
    shared = VocabularyMap(small.tokenizer, large.tokenizer, small.vocabulary, large.vocabulary).target_ids.tolist()
    for processors, only_shared in (((), False), ([RepetitionPenaltyLogitsProcessor(1.1)], True)):
        recorder = Recorder(DraftProposer(small, width=3, depth=3, nodes=9))
        sampling = Sampling(processors=processors)
        generate(large, [[300, 301, 302]], recorder, max_new_tokens=20, stop_ids=(), sampling=sampling)
        drafted = {token for tree in recorder.trees for token in tree.tokens[:, 1:].flatten().tolist()}
        assert drafted and (drafted <= {*shared}) == only_shared


def spell(tokenizer: Any, *words: str) -> list[int]:
    bytes_of = read_bytes(tokenizer)
    return [next(token for token, data in bytes_of.items() if data == word.encode()) for word in words]


def cut(draft: Any, target: Any, before: str, paths: list[list[str]], partial: bytes = b"") -> set[tuple[str, ...]]:
    """The paths in target tokens, as texts, that a draft with these paths becomes."""
    vocabulary = VocabularyMap(draft, target, len(draft), len(target))
    nodes, numbers = [DraftToken(0, -1, 0.0)], dict[tuple[str, ...], int]()
    for path in paths:
        for depth, word in enumerate(path):
            if tuple(path[: depth + 1]) not in numbers:
                numbers[tuple(path[: depth + 1])] = len(nodes)
                parent = numbers.get(tuple(path[:depth]), 0)
                nodes.append(DraftToken(*spell(draft, word), parent, nodes[parent].score - 1.0))
    tokens = target(before, add_special_tokens=False)["input_ids"]
    branches = Branches(vocabulary, tokens, partial)
    branches.add_paths(nodes)
    texts = list[tuple[str, ...]]()
    for place, node in enumerate(branches.nodes):
        above = () if node.parent < 0 else texts[node.parent]
        texts.append((*above, vocabulary.bytes_of[node.token].decode(errors="replace")))
        assert node.parent < place and node.score <= (0.0 if node.parent < 0 else branches.nodes[node.parent].score)
    return {*texts}


def test_a_text_is_cut_as_the_target_would() -> None:
    """With its last token and without, for the target may join it with what comes; and with the text before."""
    draft, target = merging(["wor", "ld", " is"]), merging(["world", " is"])
    assert cut(draft, target, "a ", [["wor", "ld"]]) == {("world",), ("wor",)}
    assert cut(draft, target, "a ", [["wor", "ld", " is"]]) == {("world",), ("world", " is")}
    # After "wor", the target's tokenizer would have joined "ld"; it has not, so the text goes on alone.
    assert cut(draft, target, "a wor", [["ld", " is"]]) == {("l",), ("l", "d"), ("l", "d", " is")}
    # A space joins the next word only in the text before.
    assert cut(merging([" is", "is"]), merging([" is", "is"]), "a ", [["is"]]) == {("is",)}
    several = cut(draft, target, "a ", [["wor", "ld"], ["wor", "d"], [" is"]])
    assert several == {("world",), ("wor",), ("wor", "d"), (" is",)}


def test_characters_that_are_not_complete() -> None:
    """The draft has not read the first bytes of a character; it drafts the whole one, or nothing that is of use."""
    draft, target = merging(["\u4f60", "\u4f60\u597d"]), merging(["ab"])
    partial = "\u4f60".encode()[:2]
    vocabulary = VocabularyMap(draft, target, len(draft), len(target))
    ids = {data: token for token, data in read_bytes(target).items()}
    text = [ids[bytes([byte])] for byte in b"a" + partial]
    for word, expected in (("\u4f60", 1), ("\u4f60\u597d", 4), ("a", 0)):
        branches = Branches(vocabulary, text, partial)
        branches.add_paths([DraftToken(0, -1, 0.0), DraftToken(*spell(draft, word), 0, -1.0)])
        assert b"".join(vocabulary.bytes_of[node.token] for node in branches.nodes) == word.encode()[2:][:expected]


def test_an_end_is_drafted_by_its_role() -> None:
    """Once, also at the root."""
    draft, target = merging(["ab"]), sentence_piece(["ab"])
    vocabulary, end = VocabularyMap(draft, target, len(draft), len(target)), draft.eos_token_id
    root, letter = DraftToken(0, -1, 0.0), DraftToken(*spell(draft, "a"), 0, -1.0)
    branches = Branches(vocabulary, [], b"")
    branches.add_paths([root, letter, DraftToken(end, 1, -2.0), DraftToken(end, 2, -3.0)])
    first, last = branches.nodes
    assert vocabulary.bytes_of[first.token] == b"a" and last.token == target.eos_token_id and last.parent == 0
    at_once = Branches(vocabulary, [], b"")
    at_once.add_paths([root, DraftToken(end, 0, -1.0)])
    assert at_once.nodes == [DraftToken(target.eos_token_id, -1, -1.0)]


def test_a_tokenizer_that_begins_each_text_with_a_space() -> None:
    """As those of Llama 2: texts are cut together with those before them, as it would add a space in their middle."""
    draft, target = merging(["ab", " ab"]), sentence_piece(["ab", " ab"])
    backend = target.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), backend.normalizer])
    vocabulary = VocabularyMap(draft, target, len(draft), len(target))
    for before, data in ((b"x ", b"ab"), (b"x", b" ab c"), (b"", b"ab")):
        cuts = vocabulary.cut(data, before)
        assert len(cuts) == (1 if before else 0)
        assert all(b"".join(vocabulary.bytes_of[token] for token in cut) == data for cut in cuts)


def test_a_draft_keeps_the_tokens_that_it_drafted() -> None:
    """They are in its cache; the target has other tokens for the same text."""
    draft, target = merging(["world", " is", " it"]), merging(["wor", " is"])
    vocabulary = VocabularyMap(draft, target, len(draft), len(target))
    text = DraftText(vocabulary)
    before = target("a ", add_special_tokens=False)["input_ids"]
    text.follow(before)
    start = len(text.ids)
    (world, an_is, an_it) = spell(draft, "world", " is", " it")
    drafted = {-1: [(world, 0)], 0: [(an_it, 1), (an_is, 2)]}
    accepted = target("world isx", add_special_tokens=False)["input_ids"]
    assert text.follow([*before, *accepted], drafted)[start:] == [world, an_is, *spell(draft, "x")]
    # Where the text leaves the draft within a token, it is cut anew.
    assert (
        read_back(draft, text.follow([*before, *accepted, *spell(target, "w")], {-1: [(world, 0)]})) == b"a world isxw"
    )
    assert text.ids[-1] == spell(draft, "w")[0]


def test_the_intersection_rule_keeps_the_targets_distribution() -> None:
    """By exact enumeration: the draft's tokens are in another order, and each side has tokens of its own."""
    ours, theirs = letters("xca"), letters("abc")
    vocabulary = VocabularyMap(ours, theirs, 5, 5)
    small: Any = SimpleNamespace(config=SimpleNamespace(), output_tokens=None)
    texts = ReadTexts(small)
    texts.vocabulary, texts._step = vocabulary, SimpleNamespace(target=SimpleNamespace(vocabulary=5))
    texts._find_drafted(torch.device("cpu"))
    assert texts.tokens is not None and texts.tokens.tolist() == [0, 1, 2, 4]

    class Mapped(Distributions):
        """The draft's probabilities of its own tokens, as `DraftProposer` gives them to the rule."""

        order = slice(None)

        def q(self, prefix: Prefix) -> torch.Tensor:
            own = super().q(prefix).log()
            fitted = texts.fit(own)[..., self.order]
            return texts.spread(fitted).softmax(dim=-1)

    for kind in ("generic", "close", "zeros in q", "zeros in p"):
        models = Mapped(kind, vocabulary=5, seed=3)
        assert measure_error(emit(in_use, models, 2), models) < EXACT

    def misplace(chain: Chain, randomness: Randomness) -> tuple[int, int]:
        """Wrong: q in the order of the draft's tokens, as transformers 5.23 and 5.24 give it."""
        return in_use(Chain(chain.tokens, chain.p, [q[[0, 1, 4, 3, 2]] for q in chain.q]), randomness)

    models = Mapped("generic", vocabulary=5, seed=3)
    assert measure_error(emit(misplace, models, 2), models) > WRONG


def test_sampled_drafts_keep_the_distribution() -> None:
    """q is a distribution over the shared tokens; the target's other tokens come from the residual."""
    ours, theirs = letters("abcdefghi"), letters("defghijkl")
    small, large = Target(tiny("llama", vocab_size=11, seed=1), ours), Target(tiny("llama", vocab_size=12), theirs)
    answers = [
        generate(large, [[3, 4, 5]] * 300, proposer, sampling=Sampling(1.0, seed=seed), max_new_tokens=4, stop_ids=())
        for seed, proposer in ((1, None), (2, DraftProposer(small, depth=3, sampled=True, nodes=4)))
    ]
    assert compare_third_tokens(*answers) < 33  # 11 degrees of freedom, p = 0.0005


def letters(text: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE({name: token for token, name in enumerate(["<s>", "</s>", *text])}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def test_a_notice_tells_how_much_is_shared(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = make_pair("byte level", "SentencePiece")
    proposer = DraftProposer(small)
    for _ in range(2):
        proposer.begin(large)
    told = capsys.readouterr().err
    assert told.count("another tokenizer") == 1 and "may do better" in told
    with pytest.raises(ValueError, match="not both have a tokenizer"):
        DraftProposer(Target(small.model)).begin(large)
    assert torch.equal(proposer._texts.translate(torch.tensor([0, 1])), torch.tensor([0, 1]))  # special tokens
