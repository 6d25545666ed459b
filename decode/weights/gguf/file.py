"""GGUF files: what their header says, and their tensors as they are stored.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. gguf-py reads a header of 262,144 tokens in nine
seconds, at every start; here it takes a quarter of one.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.weights.blocks import BLOCKS, PLAIN, Weight

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # in `struct`
STRING, ARRAY = 8, 9
DTYPES = {form: dtype for dtype, form in PLAIN.items()}
# Inputs and bytes of a block, by ggml's number of the form.
SIZES = {2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)}
SIZES |= {12: (256, 144), 13: (256, 176), 14: (256, 210)}
SIZES |= {form: (1, dtype.itemsize) for form, dtype in DTYPES.items()}
SUPPORTED = ", ".join(["F32", "F16", "BF16", *BLOCKS])


class Stored(NamedTuple):
    """A tensor in a file. shape: as in torch. begin, size: of its bytes."""

    form: int
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file: its header and a view of its bytes.

    fields: the header's values by key; of arrays, the elements.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Stored]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read a file's header.

        Raises ValueError in one line if it is no GGUF file, truncated, in parts, or has weights in another form.
        """
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"{path.name} is no GGUF file: it does not begin with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                try:
                    found = _Reader(data).read_header(path)
                except (struct.error, UnicodeDecodeError, IndexError, KeyError, ZeroDivisionError) as error:
                    raise ValueError(
                        f"the header of {path.name} is damaged or cut off; fetch the file again"
                    ) from error
                size = len(data)
        fields, tensors = found
        if fields.get("split.count", 1) > 1:
            raise ValueError(
                f"{path.name} is one of several parts; join them with llama.cpp's llama-gguf-split --merge"
            )
        end = max((tensor.begin + tensor.size for tensor in tensors.values()), default=0)
        if end > size:
            raise ValueError(f"{path.name} is cut off: it has {size} bytes of {end}; fetch it again")
        return cls(path, fields, tensors)

    @cached_property
    def architecture(self) -> str:
        return str(self.fields["general.architecture"])

    @cached_property
    def _bytes(self) -> Tensor:
        # Private, so that nothing is written back; untouched pages take no memory.
        return torch.from_file(str(self.path), shared=False, size=self.path.stat().st_size, dtype=torch.uint8)

    def weight(self, name: str, order: Tensor | None = None) -> Weight:
        """A matrix [N, K] as it is stored; of a tensor [E, N, K], [E N, K]. order: see `Weight`."""
        stored = self.tensors[name]
        data = self._bytes[stored.begin : stored.begin + stored.size]
        return Weight(data.view(prod(stored.shape[:-1]), -1), stored.form, stored.shape[-1], order)

    def plain(self, name: str) -> Tensor:
        """A copy of a tensor that is not in blocks, in float32."""
        stored = self.tensors[name]
        data = self._bytes[stored.begin : stored.begin + stored.size].clone()
        return data.view(DTYPES[stored.form]).view(stored.shape).float()


class _Reader:
    """Reads a header from its beginning to its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place = data, len(MAGIC)

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{kinds}", self.data, self.place)
        self.place += struct.calcsize(f"<{kinds}")
        return found

    def text(self) -> str:
        (length,) = self.numbers("Q")
        begin, self.place = self.place, self.place + length
        if self.place > len(self.data):
            raise IndexError("a text goes past the end")
        return self.data[begin : self.place].decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.numbers(NUMBERS[kind])[0]
        kind, count = self.numbers("IQ")
        if count > len(self.data):
            raise IndexError("an array goes past the end")
        return (
            [self.value(kind) for _ in range(count)]
            if kind in (STRING, ARRAY)
            else [*self.numbers(f"{count}{NUMBERS[kind]}")]
        )

    def read_header(self, path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
        version, count, pairs = self.numbers("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"{path.name} is in version {version} of GGUF; versions 2 and 3 can be read")
        fields = {}
        for _ in range(pairs):
            key, (kind,) = self.text(), self.numbers("I")
            fields[key] = self.value(kind)
        if "general.architecture" not in fields:
            raise ValueError(f"{path.name} names no architecture, so it is no language model")
        named = []
        for _ in range(count):
            name, (dimensions,) = self.text(), self.numbers("I")
            shape, (form, offset) = self.numbers(f"{dimensions}Q")[::-1], self.numbers("IQ")
            if form not in SIZES:
                raise ValueError(f"{path.name} has a weight, {name}, of ggml's type {form}; supported are {SUPPORTED}")
            named.append((name, form, shape, offset))
        begin = -(-self.place // (alignment := fields.get("general.alignment", ALIGNMENT))) * alignment
        return fields, {
            name: Stored(form, shape, begin + at, _count_bytes(form, shape)) for name, form, shape, at in named
        }


def _count_bytes(form: int, shape: tuple[int, ...]) -> int:
    inputs, size = SIZES[form]
    if not shape or shape[-1] % inputs:
        raise IndexError("a row must be of whole blocks")
    return prod(shape) // inputs * size
