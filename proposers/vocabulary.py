"""Drafting with another tokenizer: which tokens two vocabularies share, and a text in the other's tokens.

Tokens are compared by their bytes, since each kind of tokenizer writes them in a way of its own. Tokens of both
vocabularies are drafted as target tokens (Timor et al., 2025, "token-level intersection"); others cannot be drafted. A
wrong pair costs acceptance only: the target checks every token. Shapes: S shared tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPACE = "\u2581"  # how SentencePiece writes a space
ROLES = "bos_token_id", "eos_token_id"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
LONGEST_PARTIAL = 3  # bytes of a character that is not complete


class VocabularyMap:
    """The tokens that a draft model and a target share.

    draft, target: fast tokenizers. draft_size, target_size: their models' outputs; ids beyond them are padding.
    draft_ids, target_ids [S]: the shared tokens, in pairs. Of several tokens with the same bytes, the first one counts.

    Raises ValueError for a tokenizer whose tokens have no bytes that are known.
    """

    def __init__(self, draft: Any, target: Any, draft_size: int, target_size: int) -> None:
        self.draft, self._draft_size = draft, draft_size
        self.bytes_of = {token: data for token, data in read_bytes(target).items() if token < target_size}
        self._ids = invert(read_bytes(draft), draft_size)
        self._longest = max(map(len, self._ids))
        roles = [(getattr(draft, role, None), getattr(target, role, None)) for role in ROLES]
        self.specials = {theirs: ours for ours, theirs in roles if ours is not None and theirs is not None}
        targets = invert(self.bytes_of, target_size)
        pairs = {token: self._ids[data] for data, token in targets.items() if data in self._ids}
        self.draft_of = {**pairs, **{theirs: ours for theirs, ours in self.specials.items() if theirs < target_size}}
        shared = sorted(self.draft_of.items())
        self.target_ids, self.draft_ids = torch.tensor(shared, dtype=torch.long).view(-1, 2).unbind(1)
        self.overlap = len(pairs) / max(len(self.bytes_of), 1)  # the share of the target's tokens

    @cached_property
    def begins_with(self) -> list[int]:
        """The draft tokens that its tokenizer puts before a text."""
        plain, marked = (self.draft("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        return marked[: marked.index(plain[0])] if plain and plain[0] in marked else []

    def encode(self, data: bytes) -> list[int]:
        """Draft tokens with these bytes: the longest one each time. Bytes that no token has are left out."""
        ids, place = list[int](), 0
        while place < len(data):
            for size in range(min(self._longest, len(data) - place), 0, -1):
                token = self._ids.get(data[place : place + size])
                if token is not None:
                    ids.append(token)
                    break
            else:
                size = 1
            place += size
        return ids

    def encode_text(self, data: bytes) -> list[int]:
        """The draft's own tokens for a text: as its tokenizer cuts it, if the bytes are characters."""
        try:
            return [*self.draft(data.decode(), add_special_tokens=False, split_special_tokens=True)["input_ids"]]
        except UnicodeDecodeError:
            return self.encode(data)


class DraftText:
    """One text in the draft's tokens, which only ever grows. `ids` are they."""

    def __init__(self, vocabulary: VocabularyMap) -> None:
        self._map, self.ids, self._read, self._partial = vocabulary, list[int](), 0, b""

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The draft tokens of a text, given all its target tokens. A character that is not complete is left out."""
        new, is_first = tokens[self._read :], self._read == 0
        self._read = len(tokens)
        if is_first:
            begin = self._map.begins_with
            self.ids += begin if self._map.specials.get(new[0]) not in begin else []
            for special, data in split_at_specials(new, self._map):
                complete, self._partial = cut_character(self._partial + data)
                self.ids += self._map.encode_text(complete) if complete else []
                if special is not None:
                    self._end_character()
                    self.ids.append(special)
            if not self.ids:  # a model reads at least one token
                self._end_character()
                self.ids = self.ids or self._map.draft_ids[:1].tolist()
            return self.ids
        for token in new:
            known = self._map.draft_of.get(token)
            if known is not None and (not self._partial or token in self._map.specials):
                self._end_character()
                self.ids.append(known)
                continue
            complete, self._partial = cut_character(self._partial + self._map.bytes_of.get(token, b""))
            self.ids += self._map.encode(complete)
        return self.ids

    def _end_character(self) -> None:
        self.ids += self._map.encode(self._partial)
        self._partial = b""


def split_at_specials(tokens: Sequence[int], vocabulary: VocabularyMap) -> Iterator[tuple[int | None, bytes]]:
    """The bytes before each special token that has a counterpart, and that; at the end those after the last one."""
    data = b""
    for token in tokens:
        if token in vocabulary.specials:
            yield vocabulary.specials[token], data
            data = b""
        else:
            data += vocabulary.bytes_of.get(token, b"")
    yield None, data


def cut_character(data: bytes) -> tuple[bytes, bytes]:
    """The bytes up to the end of the last complete character, and those of one that goes on."""
    for size in range(1, min(LONGEST_PARTIAL, len(data)) + 1):
        lead = data[-size]
        if 0xC0 <= lead < 0xF8:  # begins a character of 2, 3 or 4 bytes
            length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return (data[:-size], data[-size:]) if size < length else (data, b"")
        if lead < 0x80:
            break
    return data, b""


def invert(bytes_of: dict[int, bytes], size: int) -> dict[bytes, int]:
    """The first token below `size` with each byte string."""
    found: dict[bytes, int] = {}
    for token, data in sorted(bytes_of.items()):
        if token < size and data:
            found.setdefault(data, token)
    return found


def read_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of each token of a fast tokenizer, special tokens left out.

    Raises ValueError for another kind of tokenizer than byte-level BPE and SentencePiece.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} is no fast tokenizer, so the bytes of its tokens are not known")
    decoder = json.dumps(json.loads(backend.decoder.__getstate__()), ensure_ascii=False) if backend.decoder else ""
    special = {token for token, each in tokenizer.added_tokens_decoder.items() if each.special}
    vocabulary = {token: name for name, token in tokenizer.get_vocab().items() if token not in special}
    if '"ByteLevel"' in decoder:
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        return {
            token: bytes(byte_of[character] for character in name) if set(name) <= byte_of.keys() else name.encode()
            for token, name in vocabulary.items()
        }
    if SPACE in decoder or '"Metaspace"' in decoder:
        return {
            token: bytes([int(byte[1], 16)]) if (byte := BYTE.fullmatch(name)) else name.replace(SPACE, " ").encode()
            for token, name in vocabulary.items()
        }
    kind = type(backend.model).__name__
    raise ValueError(f"a {kind} tokenizer does not tell the bytes of its tokens; use byte-level BPE or SentencePiece")
