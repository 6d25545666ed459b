"""Tokenizers from GGUF headers: tokens and ends of answers are those that llama.cpp 0.5.0 gave for the same files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from decode.weights.gguf.splits import SPLITS
from decode.weights.gguf.tokenizer import Vocabulary, make_tokenizer
from tests.support.gguf_files import write_vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# Tokens 0 to 2, 256 bytes, 19 texts, the first with the highest score, and at the end those of other types.
BEGIN = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
TEXTS = [*["▁h", "he", "lo", "llo", "hello", "▁hello", "▁a", "ab", "▁ab", "▁▁"], *"\u2581heloab<>"]
END = [("  ", USER_DEFINED), ("<tool>", USER_DEFINED), ("<|end|>", CONTROL), ("<|endoftext|>", CONTROL)]
PIECES = [*BEGIN, *((text, NORMAL) for text in TEXTS), *END]
PROMPTS = ["hello", " hello ab", "hello<tool> hello", "ab</s>ab<|end|> a", "a\u00e9\n  b   a", "", "<s>hello"]


def make(file: Any) -> PreTrainedTokenizerFast:
    return make_tokenizer(file, Vocabulary(file))


def write_pieces(path: Path, fields: dict[str, Any]) -> Any:
    """A file with the SentencePiece vocabulary above."""
    scores = [0.0] * len(BEGIN) + [-1.0 - number for number in range(len(TEXTS))] + [0.0] * len(END)
    texts, types = zip(*PIECES, strict=True)
    return write_vocabulary(path, "llama", texts, types, {"scores": scores, **fields})


def check(file: Any, prompts: Sequence[str], expected: Sequence[list[int]], folder: Path) -> None:
    """Compare a tokenizer's tokens, as it is made and as it is read again."""
    tokenizer = make(file)
    tokenizer.save_pretrained(folder)
    for each in (tokenizer, PreTrainedTokenizerFast.from_pretrained(folder)):
        assert [each(prompt)["input_ids"] for prompt in prompts] == [*expected]


OF_PROMPTS: dict[str, tuple[dict[str, Any], str]] = {  # fields of the file, and the tokens of each prompt
    "defaults": (
        {},
        """1 259 271 262; 1 269 259 271 262 267; 1 259 271 262 279 269 259 271 262; 1 267 2 267 280 269 265;
        1 265 198 172 13 278 269 275 278 269 265; 1; 1 1 259 271 262""",
    ),
    "no space at the beginning": (
        {"add_space_prefix": False},
        """1 263; 1 259 271 262 267; 1 263 279 259 271 262; 1 266 2 266 280 265;
        1 274 198 172 13 278 275 278 265; 1; 1 1 263""",
    ),
    "no BOS, but EOS": (
        {"add_bos_token": False, "add_eos_token": True},
        """259 271 262 2; 269 259 271 262 267 2; 259 271 262 279 269 259 271 262 2; 267 2 267 280 269 265 2;
        265 198 172 13 278 269 275 278 269 265 2; 2; 1 259 271 262 2""",
    ),
    "Phi-3, whose special tokens take the spaces after them": (
        {"general.name": "Tiny Phi-3"},
        """1 259 271 262; 1 269 259 271 262 267; 1 259 271 262 279 259 271 262; 1 267 2 267 280 265;
        1 265 198 172 13 278 269 275 278 265; 1; 1 1 259 271 262""",
    ),
}


@pytest.mark.parametrize("name", OF_PROMPTS)
def test_tokens_of_sentence_piece_vocabularies(name: str, tmp_path: Path) -> None:
    fields, tokens = OF_PROMPTS[name]
    expected = [[*map(int, each.split())] for each in tokens.split(";")]
    check(write_pieces(tmp_path / "v.gguf", fields), PROMPTS, expected, tmp_path)


def test_texts_of_sentence_piece_vocabularies_come_back(tmp_path: Path) -> None:
    for fields in ({}, {"add_space_prefix": False}):
        tokenizer = make(write_pieces(tmp_path / "v.gguf", fields))
        for text in ("hello", " hello ab", "a\u00e9\n b a"):
            assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
        assert tokenizer.decode([279, 280], skip_special_tokens=True) == "<tool>"


# Splits show where each piece of a text is one token: all parts of this one are tokens, and any two neighbours merge.
TEXT = "I'll DON'T 12345x!\n\n\u00e9t\u00e9 (x)_9./\r\n  \u4f60\u597d"


def write_parts(path: Path, fields: dict[str, Any]) -> Any:
    """A file with a byte-level vocabulary of all parts of `TEXT`, bytes that it lacks, and <s> and </s>."""
    letters = bytes_to_unicode()
    spelt = "".join(letters[byte] for byte in TEXT.encode())
    parts = {spelt[begin:end] for begin in range(len(spelt)) for end in range(begin + 1, len(spelt) + 1)}
    texts = sorted(parts | {*letters.values()}, key=lambda part: (len(part), part))
    merges = [f"{part[:cut]} {part[cut:]}" for part in texts for cut in range(1, len(part))]
    types = [CONTROL, CONTROL] + [NORMAL] * len(texts)
    roles = {"bos_token_id": 0, "eos_token_id": 1}
    return write_vocabulary(path, "gpt2", ["<s>", "</s>", *texts], types, {"merges": merges, **roles, **fields})


# By `tokenizer.ggml.pre`; "|" is between pieces.
OF_TEXT = {
    "gpt-2 phi-2 mpt olmo jais gigachat a.x-4.0 mellum modern-bert trillion granite-docling exaone4": (
        "I|'ll| DON|'|T| 12345|x|!|\n|\n|été| (|x|)_|9|./|\r\n | 你好"
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (
        "I|'ll| DON|'|T| |1|2|3|4|5|x|!|\n|\n|été| (|x|)_|9|./|\r\n | 你好"
    ),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": (
        "<s>|I|'ll| DON|'T| |123|45|x|!\n\n|été| (|x|)_|9|./\r\n| | 你好"
    ),
    "dbrx smaug-bpe chatglm-bpe glm4 glm5": "I|'ll| DON|'T| |123|45|x|!\n\n|été| (|x|)_|9|./\r\n| | 你好",
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 qwen35": (
        "I|'ll| DON|'T| |1|2|3|4|5|x|!\n\n|été| (|x|)_|9|./\r\n| | 你好"
    ),
    "bailingmoe bailingmoe2 llada-moe": "I|'ll| DON|'T| |1|2|3|4|5|x|!\n\n|été| (|x|)_|9|./\r\n| | 你好",
    "tekken": "<s>|I|'ll| DON|'T| |1|2|3|4|5|x|!\n\n|été| (|x|)_|9|./\r\n| | 你好",
    "gpt-4o llama4 kanana2 talkie minimax-m2": "I'll| DON'T| |123|45|x|!\n\n|été| (|x|)_|9|./\r\n| | 你好",
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": "I|'ll| DON|'T| |123|45|x|!\n\n|été| (|x|)_|9|./\r\n|  |你好",
    "deepseek-llm": "I|'|ll| DON|'|T| |12345|x|!|\n|\n|é|t|é| (|x|)_|9|./|\r|\n|  |你好",
    "deepseek-coder": "I|'|ll| DON|'|T| |1|2|3|4|5|x|!|\n|\n|été| (|x|)_|9|./|\r|\n| | |你好",
    "falcon default": "I|'|ll| DON|'|T| |123|45|x|!|\n|\n|été| |(|x|)_|9|./|\r\n | 你好",
    "bloom poro-chat gpt3-finnish": "I'll| DON'T| 12345x|!\n\n|été| (|x|)|_9|.|/|\r\n | 你好",
    "viking": "I'll| DON'T| |1|2|3|4|5|x|!\n\n|été| (|x|)|_|9|.|/|\r\n | 你好",
    "superbpe": "I'll DON'T |12|345|x!\n\nété (x)_|9|./\r\n  你好",
    "seed-coder": "I|'ll| DON|'T| |1|2|3|4|5|x|!|\n\n|été| (|x|)_|9|./|\r\n| | 你好",
}


@pytest.mark.parametrize("names", OF_TEXT)
def test_pieces_of_byte_level_vocabularies(names: str, tmp_path: Path) -> None:
    for name in names.split():
        file = write_parts(tmp_path / "v.gguf", {} if name == "default" else {"pre": name})
        tokenizer = make(file)
        ids = tokenizer(TEXT)["input_ids"]
        pieces = ["<s>" if token == 0 else tokenizer.decode([token]) for token in ids]
        assert pieces == OF_TEXT[names].split("|"), name
        assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT


def test_all_ways_to_split_are_tested() -> None:
    assert sorted(name for names in OF_TEXT for name in names.split()) == sorted(SPLITS)


def test_bos_and_eos_of_byte_level_vocabularies(tmp_path: Path) -> None:
    for fields, begin, end in (
        ({"pre": "gpt-2", "add_bos_token": True}, [0], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"pre": "llama-bpe", "add_eos_token": True}, [0], [1]),
    ):
        file = write_parts(tmp_path / "v.gguf", fields)
        (letter,) = make(file)("x", add_special_tokens=False)["input_ids"]
        check(file, ["x", "x<s>x"], [[*begin, letter, *end], [*begin, letter, 0, letter, *end]], tmp_path)


CHATML = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
# Tokens, each followed by its type, more of the header, and the tokens that end an answer.
ENDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "named ones": ("<e>3 <t>3 <m>3", {"eos_token_id": 0, "eot_token_id": 1, "eom_token_id": 2}, "<e> <t> <m>"),
    "the named one first": ("<|endoftext|>3 <|im_end|>3", {"eos_token_id": 1}, "<|im_end|> <|endoftext|>"),
    "Gemma": ("<eos>3 <end_of_turn>3 a1", {"eos_token_id": 0}, "<eos> <end_of_turn>"),
    "none is named": ("<|im_end|>3 a1", {}, "<|im_end|>"),
    "a turn's end that the template writes": ("<|im_end|>4 a1", {"tokenizer.chat_template": CHATML}, "<|im_end|>"),
    "a message's end in a longer answer": (
        "<|end|>3 <|return|>3 <|call|>3",
        {"eos_token_id": 1},
        "<|return|> <|call|>",
    ),
    # llama.cpp has more in these:
    "no token is taken for granted": (" ".join(f"{chr(97 + number)}1" for number in range(20)), {}, ""),
    "HTML is text": ("<eos>3 </s>4 a1", {"eos_token_id": 0}, "<eos>"),
    "an end of another file": ("<|endoftext|>3 <|file_sep|>3", {"eos_token_id": 0}, "<|endoftext|>"),
    "an id that is no token": ("a1 b1", {"eos_token_id": 2}, ""),
}


@pytest.mark.parametrize("name", ENDS)
def test_tokens_that_end_an_answer(name: str, tmp_path: Path) -> None:
    tokens, fields, expected = ENDS[name]
    texts, types = zip(*((token[:-1], int(token[-1])) for token in tokens.split()), strict=True)
    file = write_vocabulary(tmp_path / "v.gguf", "gpt2", texts, types, {"merges": ["a b"], **fields})
    vocabulary, made = Vocabulary(file), make(file)
    assert [vocabulary.texts[token] for token in vocabulary.ends] == expected.split()
    added = {str(token) for token in made.added_tokens_decoder.values() if token.special}
    assert {*made.all_special_tokens} | added >= {*expected.split()}


REFUSED: dict[str, tuple[str, list[str], dict[str, Any], str]] = {
    "another kind": ("bert", ["a", "b"], {}, r"of the kind 'bert'; supported are gpt2, llama, gemma4"),
    "another way to split": ("gpt2", ["a", "b"], {"pre": "kimi-k2", "merges": ["a b"]}, "'kimi-k2'.*tokenizer.json"),
    "no merges": ("gpt2", ["a", "b"], {}, "has no merges"),
    "tokens without a type": ("llama", ["a", "b"], {"scores": [0.0]}, "not all of its tokens have a type and a score"),
    "a token twice": ("llama", ["a", "b", "a"], {}, "it has 'a' twice"),
    "no tokenizer": ("llama", [], {}, "has no tokenizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_vocabularies_are_refused(name: str, tmp_path: Path) -> None:
    kind, texts, fields, message = REFUSED[name]
    file = write_vocabulary(tmp_path / "v.gguf", kind, texts, [NORMAL] * len(texts), fields)
    with pytest.raises(ValueError, match=message):
        make(file)
