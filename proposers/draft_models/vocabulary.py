"""Drafting with another tokenizer: which tokens two vocabularies share, and a text in the other's tokens.

Tokens are compared by their bytes, since each kind of tokenizer writes them in a way of its own. Tokens that both have
can be drafted one by one (Timor et al., 2025, "token-level intersection"); `retokenized` drafts all. A wrong pair costs
acceptance only: the target checks every token. Shapes: S shared tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

Children = dict[int, list[tuple[int, int]]]  # by node (-1: the end of the text): the tokens after it and their nodes

SPACE = "\u2581"  # how SentencePiece writes a space
ROLES = "bos_token_id", "eos_token_id"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
LONGEST_PARTIAL = 3  # bytes of a character that is not complete


class VocabularyMap:
    """The tokens that a draft model and a target share.

    draft, target: fast tokenizers. draft_size, target_size: their models' outputs; ids beyond them are padding.
    draft_ids, target_ids [S]: the shared tokens, in pairs. Of several tokens with the same bytes, the first one counts.
    specials, target_specials: the draft's special tokens for the target's, by their role, and the reverse.

    Raises ValueError for a tokenizer whose tokens have no bytes that are known.
    """

    def __init__(self, draft: Any, target: Any, draft_size: int, target_size: int) -> None:
        self.draft, self.target, self._draft_size = draft, target, draft_size
        self.bytes_of = {token: data for token, data in read_bytes(target).items() if token < target_size}
        self.draft_bytes = {token: data for token, data in read_bytes(draft).items() if token < draft_size}
        self._ids = invert(self.draft_bytes, draft_size)
        self._longest = max(map(len, self._ids))
        roles = [(getattr(draft, role, None), getattr(target, role, None)) for role in ROLES]
        self.specials: dict[int, int] = {
            theirs: ours
            for ours, theirs in roles
            if ours is not None and theirs is not None and ours < draft_size and theirs < target_size
        }
        self.target_specials = {ours: theirs for theirs, ours in self.specials.items()}
        self._target_ids = targets = invert(self.bytes_of, target_size)
        pairs = {token: self._ids[data] for data, token in targets.items() if data in self._ids}
        self.draft_of = {**pairs, **self.specials}
        shared = sorted(self.draft_of.items())
        self.target_ids, self.draft_ids = torch.tensor(shared, dtype=torch.long).view(-1, 2).unbind(1)
        self._placed: dict[tuple[str, torch.device], Tensor] = {}
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
            size = find_longest(self._ids, data[place : place + self._longest])
            if size:
                ids.append(self._ids[data[place : place + size]])
            place += max(size, 1)
        return ids

    def place(self, name: str, device: torch.device) -> Tensor:
        """`draft_ids`, `target_ids` or `first_tokens` on a device, where it stays."""
        if (name, device) not in self._placed:
            self._placed[name, device] = getattr(self, name).to(device)
        return self._placed[name, device]

    @cached_property
    def first_tokens(self) -> Tensor:
        """For each draft token, the target token that its text begins with [draft_size]; 0 for those without text."""
        first = torch.zeros(self._draft_size, dtype=torch.long)
        first[self.draft_ids] = self.target_ids
        known = {*self.draft_ids.tolist()}
        for token, data in self.draft_bytes.items():
            if token not in known and (size := find_longest(self._target_ids, data)):
                first[token] = self._target_ids[data[:size]]
        return first

    def cut(self, data: bytes, before: bytes, partial: bytes = b"") -> list[list[int]]:
        """The target's tokens for a text after another one: as its tokenizer cuts both together, and the text alone.

        partial: the bytes between them, of a character that the text completes. Cuts that are no tokens of the text
        alone are left out.
        """
        found = list[list[int]]()
        for start in (before + partial, b""):
            try:
                text = (start + data).decode()
            except UnicodeDecodeError:  # the text alone begins within a character
                continue
            ids = self.target.backend_tokenizer.encode(text, add_special_tokens=False).ids
            spelt = b"".join(self.bytes_of.get(token, b"") for token in ids)
            # Some tokenizers begin each text with a space.
            begin = len(start) + (len(spelt) > len(start) + len(data) and bool(start))
            ends = [*accumulate((len(self.bytes_of.get(token, b"")) for token in ids), initial=0)]
            if spelt == b" " * (begin - len(start)) + start + data and begin in ends:
                cut = ids[ends.index(begin) :]
                found += [cut] if cut and cut not in found and all(token in self.bytes_of for token in cut) else []
        return found

    def encode_text(self, data: bytes, is_first: bool = True) -> list[int]:
        """The draft's own tokens for a text or, unless it is the first, a part of one: as its tokenizer cuts it.

        Bytes that are no characters, and parts that the tokenizer would begin with a space, are cut by `encode`.
        """
        try:
            ids = [*self.draft(data.decode(), add_special_tokens=False, split_special_tokens=True)["input_ids"]]
        except UnicodeDecodeError:
            return self.encode(data)
        is_same = is_first or b"".join(self.draft_bytes.get(token, b"") for token in ids) == data
        return ids if is_same else self.encode(data)


class DraftText:
    """One text in the draft's tokens, which only ever grows. `ids` are they; `partial` is what they do not have yet."""

    def __init__(self, vocabulary: VocabularyMap) -> None:
        self._map, self.ids, self._read, self.partial = vocabulary, list[int](), 0, b""

    def follow(self, tokens: Sequence[int], drafted: Children | None = None) -> list[int]:
        """The draft tokens of a text, given all its target tokens. A character that is not complete is left out.

        drafted: what the draft model read after the text before; as far as the text is that, it keeps its tokens.
        """
        new, is_first = tokens[self._read :], self._read == 0
        self._read = len(tokens)
        if is_first:
            begin = self._map.begins_with
            self.ids += begin if self._map.specials.get(new[0]) not in begin else []
        for special, data in split_at_specials(new, self._map):
            if drafted:
                data = self._take_drafted(self.partial + data, drafted)
                drafted, self.partial = None, b""
            complete, self.partial = cut_character(self.partial + data)
            self.ids += self._map.encode_text(complete, is_first) if complete else []
            if special is not None:
                self._end_character()
                self.ids.append(special)
        if not self.ids:  # a model reads at least one token
            self._end_character()
            self.ids = self.ids or self._map.draft_ids[:1].tolist()
        return self.ids

    def _take_drafted(self, data: bytes, drafted: Children) -> bytes:
        """Add the drafted tokens that these bytes begin with. Returns the other bytes."""
        node = -1
        while True:
            spelt = [(self._map.draft_bytes.get(token, b""), token, after) for token, after in drafted.get(node, ())]
            best = max((each for each in spelt if each[0] and data.startswith(each[0])), default=None)
            if best is None:
                return data
            self.ids.append(best[1])
            data, node = data[len(best[0]) :], best[2]

    def _end_character(self) -> None:
        self.ids += self._map.encode(self.partial)
        self.partial = b""


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


def find_longest(ids: dict[bytes, int], data: bytes) -> int:
    """How many of the first bytes the longest token has that they begin with; 0 without one."""
    return next((size for size in range(len(data), 0, -1) if data[:size] in ids), 0)


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
