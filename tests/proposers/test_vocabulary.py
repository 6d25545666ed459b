"""Drafting with another tokenizer: the map by bytes, texts that are carried over, and the target's text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from decode import Sampling, Target, generate
from proposers import DraftProposer, MergedProposer
from proposers.draft_models.vocabulary import DraftText, VocabularyMap, cut_character, read_bytes
from tests.support.drafting import Recorder
from tests.support.enumeration import compare_third_tokens
from tests.support.models import tiny
from tests.support.tokenizers import byte_level, sentence_piece

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


def test_a_character_is_cut_where_it_ends() -> None:
    for text in ("a", "é", "你", "🙂", "a🙂"):
        data = text.encode()
        for end in range(len(data) + 1):
            complete, partial = cut_character(data[:end])
            assert complete + partial == data[:end]
            assert complete.decode() == data[:end].decode(errors="ignore")
    assert cut_character(b"\xff\x80") == (b"\xff\x80", b"")  # no text


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


def test_only_shared_tokens_are_drafted() -> None:
    small, large = make_pair("byte level", "SentencePiece")
    recorder = Recorder(DraftProposer(small, width=3, depth=3, nodes=9))
    generate(large, [[300, 301, 302]], recorder, max_new_tokens=20, stop_ids=())
    shared = VocabularyMap(small.tokenizer, large.tokenizer, small.vocabulary, large.vocabulary).target_ids.tolist()
    drafted = {token for tree in recorder.trees for token in tree.tokens[:, 1:].flatten().tolist()}
    assert drafted and drafted <= {*shared}


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
    """A tokenizer whose tokens are single letters."""
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
    assert torch.equal(proposer._session.translate(torch.tensor([0, 1])), torch.tensor([0, 1]))  # special tokens
