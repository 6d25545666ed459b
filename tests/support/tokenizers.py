"""Small tokenizers of the two kinds that most models have."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ["<s>", "</s>"]


def byte_level(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """All bytes, and words as tokens of their own (without merges: a text is cut into bytes)."""
    letters = bytes_to_unicode()
    names = ["".join(letters[byte] for byte in word.encode()) for word in words]
    vocabulary = {name: token for token, name in enumerate([*SPECIAL, *letters.values(), *names])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def merging(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """All bytes, and the beginnings of words as tokens that letters are merged to, as in real tokenizers."""
    letters, merges, names = bytes_to_unicode(), dict[tuple[str, str], None](), dict[str, None]()
    for word in words:
        spelt = [letters[byte] for byte in word.encode()]
        for size in range(1, len(spelt)):
            merges["".join(spelt[:size]), spelt[size]] = None
            names["".join(spelt[: size + 1])] = None
    vocabulary = {name: token for token, name in enumerate([*SPECIAL, *letters.values(), *names])}
    backend = Tokenizer(models.BPE(vocabulary, [*merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def sentence_piece(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Bytes as a fallback, letters, and words, where a space is U+2581."""
    letters = [*map(chr, range(33, 127)), "\u2581"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    names = [word.replace(" ", "\u2581") for word in words]
    pieces = [*SPECIAL, *fallback, *dict.fromkeys([*letters, *names])]
    backend = Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
