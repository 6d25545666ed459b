"""What transformers makes of a GGUF file's header: a config and a tokenizer, kept in the user's cache.

Reading them takes seconds, so it is done once.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import transformers
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from decode.cpu.build_cache import digest
from decode.models.gguf_file import GgufFile
from decode.models.user_cache import print_notice, scratch, user_cache

# llama.cpp's names of ways to split text before byte-level BPE: each digit is a token, which transformers loses.
SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
ROLES = {"unk_token": "unknown", "bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
GGUF_ADVICE = 'reading a GGUF file needs the gguf package: run pip install "draftless[gguf]"'
DESCRIPTION = "config.json", "tokenizer.json"


def is_installed(package: str) -> bool:
    """Whether a package could be imported.

    `importlib.util.find_spec("pip")` would also ask setuptools, which then refuses to be imported: torch's compilers
    would fail later in this process.
    """
    return PathFinder.find_spec(package) is not None


def describe(file: GgufFile) -> Path:
    """A folder with the config and the tokenizer of a file: its own folder, if they are there, or one in the cache.

    Raises ValueError if transformers does not know the architecture, and without the package gguf.
    """
    if all((file.path.parent / name).is_file() for name in DESCRIPTION):
        return file.path.parent
    state = file.path.stat()
    known = str(file.path.resolve()), state.st_size, state.st_mtime_ns, transformers.__version__
    folder = user_cache() / "gguf" / digest(known)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            print_notice(f"reading the header of {file.path.name}, once")
            with scratch(folder.with_suffix(".partial")) as temporary:
                write_description(file, temporary)
                temporary.rename(folder)
    return folder


def write_description(file: GgufFile, folder: Path) -> None:
    """Write a file's config, generation config and tokenizer, chat template included. Errors: those of `describe`."""
    if not is_installed("gguf"):
        raise ValueError(GGUF_ADVICE)
    place = {"pretrained_model_name_or_path": str(file.path.parent), "gguf_file": file.path.name}
    with _reading_once(), contextlib.redirect_stderr(io.StringIO()):
        config = AutoConfig.from_pretrained(**place)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    config._name_or_path = ""
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    _complete(tokenizer, file).save_pretrained(folder)


@contextlib.contextmanager
def _reading_once() -> Iterator[None]:
    """Let transformers parse a file once: it asks gguf-py for the config and for the tokenizer."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _complete(tokenizer: Any, file: GgufFile) -> PreTrainedTokenizerFast:
    """A tokenizer with what transformers loses of the file: digits that stay apart, special tokens, the template."""
    fields, backend = file.fields, tokenizer.backend_tokenizer
    if fields.get("tokenizer.ggml.pre") in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokens, special = fields["tokenizer.ggml.tokens"], {}
    for role, key in ROLES.items():
        number = fields.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and number < len(tokens):
            special[role] = tokens[number]
    length = fields.get(f"{file.architecture}.context_length")
    completed = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=length, **special)
    completed.chat_template = fields.get("tokenizer.chat_template")
    return completed
