"""Tokens and ends of answers of GGUF files, compared with llama.cpp's.

    python -m docs.measure.compare_tokenizers FILE.gguf ... [--pre NAME ...] [--questions FILE.jsonl]

It needs the package llama-cpp-python. Files may have a vocabulary only, such as those in llama.cpp's folder `models`.
Texts: the questions, parts of them, and random sequences of words, numbers, spaces, emoji, code, special tokens and
Unicode characters. --pre: the files are also read as if their header named these ways to split text.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import llama_cpp

from decode.weights.gguf.file import GgufFile
from decode.weights.gguf.tokenizer import CONTROL, USER_DEFINED, Vocabulary, make_tokenizer
from draftless_commands.benchmark.files import find_commit

TEXTS, SHOWN = 3000, 3
SHARES = 6, 4, 4, 0.3, 0.7  # of words, other parts, spaces, special tokens and single characters
LINES = (
    "the Don't WE'LL I'm you'RE don\u2019t iPhone camelCaseWord SCREAMING_CASE https://example.org/a?b=c user@mail.com",
    "l'ann\u00e9e Stra\u00dfe \u00c0\u00c9\u00ce na\u00efve e\u0301a\u0308 Vi\u1ec7t \u0130stanbul \u01c4 \ufb01re",
    "\u041c\u043e\u0441\u043a\u0432\u0430 \u0451\u043b\u043a\u0430 \u0395\u03bb\u03bb\u03ac\u03b4\u03b1",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u4f60\u597d\u4e16\u754c \u6771\u4eac\u30bf\u30ef\u30fc \ud55c\uad6d\uc5b4",
    "\u00bd \u00b2 \u216b \u0663\u0664 \u4e00\u4e8c\u4e09",
    "#tag $9.99 50% C++ x**2 a->b != === // /* */ <br/> {{x}} [0:3] \\n",
)
WORDS = [word for line in LINES for word in line.split()]
PARTS = [
    *(" ", "  ", "   ", "    ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", "\u200b", "\u2028"),
    *("0", "42", "1234567"),
    *("3.14", "1,000,000", "\U0001f642", "\U0001f469\u200d\U0001f467", "\u2764\ufe0f", "\U0001f1eb\U0001f1f7", "..."),
    *("!?", "\u2026", "\u2013", "\u00ab", "\u300c", "def f(x):\n    return x", "for (int i = 0; i < n; ++i) {\n\t}"),
]
SPACES = [" ", " ", " ", "", "", "\n"]


def make_texts(count: int, questions: Path | None, special: list[str]) -> list[str]:
    """Texts of all kinds. special: texts of tokens that are found before a text is split."""
    draw, texts = random.Random(0), ["", " ", "\n", "a", *PARTS, *WORDS]
    lines = questions.read_text(encoding="utf-8").splitlines() if questions else []
    written = [text for line in lines for text in json.loads(line)["turns"]]
    texts += draw.sample(written, min(len(written), count // 4))
    for text in written[: count // 8]:
        begin = draw.randrange(len(text))
        texts.append(text[begin : begin + draw.randrange(80)])
    assigned = [chr(code) for code in range(1, 0x30000) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
    while len(texts) < count:
        kinds = draw.choices((WORDS, PARTS, SPACES, special or PARTS, assigned), SHARES, k=draw.randrange(1, 25))
        texts.append("".join(draw.choice(kind) for kind in kinds))
    return texts


class LlamaCpp:
    """llama.cpp's vocabulary of a file."""

    def __init__(self, file: Path) -> None:
        options = llama_cpp.llama_model_default_params()
        options.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
        if not model:
            raise ValueError("llama.cpp cannot read it")
        self.vocabulary = llama_cpp.llama_model_get_vocab(model)

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self.vocabulary, data, len(data), ids, len(ids), True, True)
        return ids[:count]

    def find_ends(self) -> set[int]:
        count = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        return {token for token in range(count) if llama_cpp.llama_vocab_is_eog(self.vocabulary, token)}


def compare(path: Path, questions: Path | None) -> dict[str, Any]:
    """How many texts have the same tokens, and which tokens end an answer in one of the two only."""
    file = GgufFile.open(path)
    try:
        vocabulary = Vocabulary(file)
        tokenizer = make_tokenizer(file, vocabulary)
    except ValueError as error:
        return {"refused": str(error)}
    theirs = LlamaCpp(path)
    kinds = zip(vocabulary.texts, vocabulary.types, strict=False)
    special = [text for text, kind in kinds if kind in (CONTROL, USER_DEFINED)]
    texts = make_texts(TEXTS, questions, special)
    found = [(text, tokenizer(text)["input_ids"], theirs.encode(text)) for text in texts]
    others = [case for case in found if case[1] != case[2]]
    ends, expected = set(vocabulary.ends), theirs.find_ends()
    name = vocabulary.texts.__getitem__
    return {
        "texts": len(texts),
        "equal": len(texts) - len(others),
        "differences": sorted(others, key=lambda case: len(case[0]))[:SHOWN],
        "ends": sorted(map(name, ends)),
        "ends here only": sorted(map(name, ends - expected)),
        "ends in llama.cpp only": sorted(map(name, expected - ends)),
    }


def rename(path: Path, pre: str, folder: Path) -> Path:
    """A copy of a file whose header names another way to split text. Its tensors, if any, are not moved."""
    data, key = path.read_bytes(), b"tokenizer.ggml.pre"
    begin = data.index(key) + len(key) + 4
    size = int.from_bytes(data[begin : begin + 8], "little")
    copy = folder / f"{pre}.gguf"
    copy.write_bytes(data[:begin] + len(pre).to_bytes(8, "little") + pre.encode() + data[begin + 8 + size :])
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--pre", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--questions", type=Path)
    args = parser.parse_args()
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, None)
    report: dict[str, Any] = {"llama-cpp-python": llama_cpp.__version__, "commit": find_commit()}
    for path in args.files:
        report[path.name] = compare(path, args.questions)
        for pre in args.pre:
            with tempfile.TemporaryDirectory() as folder:
                report[f"{path.name} as {pre}"] = compare(rename(path, pre, Path(folder)), args.questions)
    print(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
