"""Saved heads: bit-exact when loaded, never half-written, and with the tensors that vLLM's Medusa class reads."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heads import HEADS, LayerConfig, MedusaConfig, MedusaHead, load_head, save_head
from tests.heads.test_head_layouts import PUBLISHED, made_medusa, name_all, write
from tests.heads.test_heads import HIDDEN, drawn, randomised
from tests.support.models import VOCABULARY, tiny

PREFIX = LayerConfig(6, 2, 4, 10, rope_theta=1234.0, rms_norm_eps=1e-3, input_norm=False)
ORIGIN = {"target_layers": 30, "target_name": "little"}
FILES = ["config.json", "model.safetensors"]


def made(kind: str, **settings: Any) -> Any:
    head_class, config_class = HEADS[kind]
    head = randomised(head_class(config_class(HIDDEN, VOCABULARY, **settings)))
    if head.token_map is not None:
        head.token_map = torch.arange(head.draft_size) * 2 + 1
    if head.output == "target":
        head.borrow(drawn(VOCABULARY, HIDDEN))
    return head


@pytest.mark.parametrize("output", ["own", "shared", "target"])
@pytest.mark.parametrize("draft_size", [None, 7])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("medusa", {"heads": 3, "layers": 2, "bias": False}),
        ("medusa", ORIGIN),
        ("hydra", {"heads": 3, "layers": 3, "projected": True, "output_bias": True}),
        ("hydra", {"prefix": PREFIX, **ORIGIN}),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_a_saved_head_loads_bit_exact(tmp_path, kind, settings, output, draft_size, dtype):
    if output == "target":
        settings = {name: value for name, value in settings.items() if name != "output_bias"}
    head = made(kind, output=output, draft_size=draft_size, **settings)
    save_head(head, tmp_path / "new" / "head", dtype)
    loaded = load_head(tmp_path / "new" / "head")
    assert type(loaded) is type(head) and loaded.config == head.config
    stored = head if dtype is None else head.to(dtype)
    assert_equal(loaded.state_dict(), stored.state_dict())
    if output == "target" and kind == "medusa":
        assert torch.equal(loaded.borrowed, stored.borrowed)
    assert sorted(os.listdir(tmp_path / "new" / "head")) == FILES


def assert_equal(states: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert states.keys() == expected.keys()
    assert all(
        states[name].dtype == state.dtype and torch.equal(states[name], state) for name, state in expected.items()
    )


def list_vllm_parameters(config: dict[str, Any]) -> dict[str, list[int]]:
    """The parameters that vLLM 0.32's Medusa class builds from its config. It ignores other tensors silently."""
    hidden, drafted = config["hidden_size"], config["truncated_vocab_size"]
    shapes = {}
    for i in range(config["num_heads"]):
        for j in range(config["num_hidden_layers"]):
            shapes[f"blocks.{i}.layers.{j}.weight"] = [hidden, hidden]
            if config.get("medusa_fc_bias", False):
                shapes[f"blocks.{i}.layers.{j}.bias"] = [hidden]
        if not config.get("original_lm_head", False):
            shapes[f"lm_heads.{i}.weight"] = [drafted, hidden]
    if config.get("original_lm_head", False):
        shapes["lm_head.weight"] = [drafted, hidden]
    if drafted < config["vocab_size"]:
        shapes["token_map"] = [drafted]
    return shapes


@pytest.mark.parametrize("output", ["own", "shared", "target"])
@pytest.mark.parametrize("draft_size", [None, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_the_tensors_are_those_of_vllms_class(tmp_path, output, draft_size, bias):
    head = made("medusa", heads=3, layers=2, output=output, draft_size=draft_size, bias=bias)
    save_head(head, tmp_path, torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["MedusaModel"] and config["model_type"] == "medusa"
    assert (config["hidden_size"], config["vocab_size"]) == (HIDDEN, VOCABULARY)
    renamed = {"num_heads": "heads", "num_hidden_layers": "layers"}  # vLLM renames every key with these words
    assert {name for name in config if "num" in name and ("heads" in name or "layers" in name)} == {*renamed}
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == list_vllm_parameters(config)
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in tensors.items() if name != "token_map")
    for index in range(3):
        matrix = tensors.get("lm_head.weight", tensors.get(f"lm_heads.{index}.weight"))
        assert torch.equal(matrix, head.output_layer(index)[0].bfloat16())


def test_a_medusa_head_without_its_matrix_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="pass it to borrow"):
        save_head(MedusaHead(MedusaConfig(HIDDEN, VOCABULARY, output="target")), tmp_path / "head")
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk_leaves_a_whole_head(tmp_path, monkeypatch, name, calls):
    """The old head loads until the weights are replaced, then the new one, even if config.json is still the old one."""
    old, new = made("medusa", **ORIGIN), made("hydra", output="target", draft_size=9)
    save_head(old, tmp_path)
    left = [calls]

    def fail(*args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args)

    real = getattr(os, name)
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="No space left"):
        save_head(new, tmp_path)
    monkeypatch.undo()
    expected = old if calls == 1 else new
    loaded = load_head(tmp_path)
    assert loaded.config == expected.config
    assert_equal(loaded.state_dict(), expected.state_dict())
    assert sorted(os.listdir(tmp_path)) == FILES
    save_head(new, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "hydra"


def kill_during_save(head: Any, folder: Path, calls: int) -> None:
    """Save a head in a process that is killed just before it replaces its `calls`-th file."""
    process = os.fork()
    if not process:
        real, left = os.replace, [calls]

        def replace_or_die(*paths: Any) -> None:
            left[0] -= 1
            real(*paths) if left[0] else os.kill(os.getpid(), signal.SIGKILL)

        os.replace = replace_or_die
        try:
            save_head(head, folder)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL


@pytest.mark.parametrize("calls", [1, 2])
def test_a_kill_leaves_a_whole_head(tmp_path, calls):
    old, new = made("medusa", heads=3), made("medusa", heads=2)
    save_head(old, tmp_path / "old")
    for folder in ("old", "new"):
        kill_during_save(new, tmp_path / folder, calls)
    assert load_head(tmp_path / "old").config == (old if calls == 1 else new).config
    if calls == 1:
        with pytest.raises(ValueError, match="it holds none of"):
            load_head(tmp_path / "new")
    else:
        assert load_head(tmp_path / "new").config == new.config
    for folder in ("old", "new"):
        save_head(made("hydra"), tmp_path / folder)
        assert sorted(os.listdir(tmp_path / folder)) == FILES


def test_saving_replaces_only_a_saved_head(tmp_path):
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path / "target")
    before = (tmp_path / "target" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"holds something else \(model.safetensors, config.json\)"):
        save_head(made("medusa"), tmp_path / "target")
    assert (tmp_path / "target" / "model.safetensors").read_bytes() == before
    (tmp_path / "published").mkdir()
    write(tmp_path / "published", "medusa_lm_head.pt", name_all(made_medusa()), PUBLISHED)
    with pytest.raises(ValueError, match="holds something else"):
        save_head(made("medusa"), tmp_path / "published")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="it is a file; name a folder"):
        save_head(made("medusa"), tmp_path / "file")


def test_a_loaded_head_can_be_saved_in_its_folder(tmp_path):
    head = made("medusa", output="target")
    save_head(head, tmp_path)
    loaded = load_head(tmp_path)
    save_head(loaded, tmp_path)
    assert_equal(load_head(tmp_path).state_dict(), head.state_dict())
