"""Saved heads: bit-exact when loaded, never half-written, and with the tensors and config that servers read."""

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
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from heads import load_head, save_head
from tests.support.models import tiny
from tests.support.published_heads import MEDUSA, READ, name_medusa, write
from tests.support.small_heads import HIDDEN, LAYER, LLAMA3, VOCABULARY, YARN, assert_same, made

ORIGIN = {"target_layers": 30, "target_name": "little"}
FILES = ["config.json", "model.safetensors"]
QWEN3 = {"qkv_bias": True, "qk_norm": True, "rope_scaling": LLAMA3}
FLAGS = dict.fromkeys(("embedding", "bias", "fc_norm", "norm_before_residual", "normed_feedback"), True)
QWEN2 = {"qkv_bias": True, "input_norm": True, "rope_scaling": YARN}
HEADS: list[tuple[str, dict[str, Any]]] = [
    *(
        (kind, {**settings, "output": output, "draft_size": draft_size})
        for output in ("own", "shared", "target")
        for draft_size in (None, 7)
        for kind, settings in (
            ("medusa", {"layers": 2, "bias": False}),
            ("medusa", ORIGIN),
            ("hydra", {"layers": 3, "projected": True, "output_bias": output != "target"}),
            ("hydra", {"prefix": LAYER, **ORIGIN}),
        )
    ),
    ("eagle", {**ORIGIN, "max_position_embeddings": 512}),
    ("eagle", {"layer": QWEN2, "bias": True, "draft_size": 5}),
    ("eagle3", {**ORIGIN, "draft_size": 5}),
    ("eagle3", {"output": "target"}),
    ("eagle3", {"layer": QWEN3, **FLAGS, "target_hidden_size": 12, "features": (1, 2)}),
    ("eagle3", {"norm_before_fc": True, "final_norm": False}),
    ("peagle", {**ORIGIN, "draft_size": 5}),
    ("peagle", {"output": "target", "heads": 5}),
    ("peagle", {"layers": 3, "layer": {"window": 7}}),
    ("eagle3", {"layers": 2}),
    ("multi-token", {**ORIGIN, "draft_size": 5, "output": "own"}),
    ("jump", {**ORIGIN, "draft_size": 5, "features": (3, 4), "layer": {"qkv_bias": True, "rope_scaling": YARN}}),
    ("mtp", {**ORIGIN, "draft_size": 5, "normed_feedback": True}),
    ("dflash", {**ORIGIN, "draft_size": 5}),
    ("dflash", {"layers": 1, "heads": 5, "layer": {"qk_norm": False, "rope_scaling": YARN}}),
    ("dflash", {"layer": {"window": 7}, "causal": True}),
    ("dflash", {"layer": {"window": 7}, "full_layers": (1,)}),
    ("dflash", {"candidates": 4, "taps": 3, "group": 4, "from_anchor": False}),
    ("flashmap", {**ORIGIN, "draft_size": 5, "features": (1, 2)}),
    ("eagle3", {"layer": {"window": 7}}),
    ("dflash", {"output": "shared", "draft_size": 5, "pair_rank": 0, "from_anchor": False, "features": (1, 2)}),
]


@pytest.mark.parametrize(("kind", "settings"), HEADS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_a_saved_head_loads_bit_exact(tmp_path, kind, settings, dtype):
    head, folder = made(kind, **settings), tmp_path / "new" / "head"
    save_head(head, folder, dtype)
    head = head.to(dtype or torch.float64)
    for _ in range(2):  # the second time, a loaded head is saved in its own folder
        assert sorted(os.listdir(folder)) == FILES
        loaded = load_head(folder)
        assert_same(loaded, head)
        save_head(loaded, folder)


DFLASH2 = {"candidates": 4, "taps": 2, "group": 2, "from_anchor": False}


@pytest.mark.parametrize(("window", "full"), [(None, ()), (7, ()), (7, (0,))])
@pytest.mark.parametrize("more", [{"draft_size": 5}, DFLASH2 | {"logit_factor": 0.2, "logit_cap": 9.0}])
def test_a_block_head_means_the_same_without_our_settings(tmp_path, window, full, more):
    head = made("dflash", layer={"window": window}, causal=True, full_layers=full, **more)
    save_head(head, tmp_path)
    config, tensors = read(tmp_path)
    config.pop("draftless")
    loaded = load_head(write(tmp_path, "model.safetensors", tensors, config))
    assert (loaded.config.logit_factor, loaded.config.logit_cap) == (head.config.logit_factor, head.config.logit_cap)
    assert loaded.config.causal and loaded.window == window and loaded.config.full_layers == full
    assert [(each.candidates, each.taps, each.group) for each in (loaded.config, head.config)] == [
        tuple(more.get(name, 0) for name in ("candidates", "taps", "group"))
    ] * 2


@pytest.mark.parametrize("settings", [{}, {"final_norm": False}, {"fc_norm": True, "normed_feedback": True}])
def test_an_eagle3_head_means_the_same_without_our_settings(tmp_path, settings):
    head = made("eagle3", **settings)
    save_head(head, tmp_path)
    config, tensors = read(tmp_path)
    config.pop("draftless")
    loaded = load_head(write(tmp_path, "model.safetensors", tensors, config))
    for name in ("final_norm", "fc_norm", "normed_feedback", "norm_before_residual"):
        assert getattr(loaded.config, name) == getattr(head.config, name), name


# ---- what servers read ----


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


@pytest.mark.parametrize("output", ["own", "shared"])
@pytest.mark.parametrize("draft_size", [None, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_vllm_can_read_a_medusa_head(tmp_path, output, draft_size, bias):
    head = made("medusa", layers=2, output=output, draft_size=draft_size, bias=bias)
    save_head(head, tmp_path, torch.bfloat16)
    config, tensors = read(tmp_path)
    assert config["architectures"] == ["MedusaModel"] and config["model_type"] == "medusa"
    assert (config["hidden_size"], config["vocab_size"]) == (HIDDEN, VOCABULARY)
    renamed = {"num_heads": "heads", "num_hidden_layers": "layers"}  # vLLM renames every key with these words
    assert {name for name in config if "num" in name and ("heads" in name or "layers" in name)} == {*renamed}
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == list_vllm_parameters(config)
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in tensors.items() if name != "token_map")
    for index in range(3):
        matrix = tensors.get("lm_head.weight", tensors.get(f"lm_heads.{index}.weight"))
        assert torch.equal(matrix, head.output_layer(index)[0].bfloat16())


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def check_layer(folder: Path, prefix: str, inputs: int) -> dict[str, list[int]]:
    """Check the layer that a server builds from the config. Returns the shapes of all other tensors."""
    config, tensors = read(folder)
    assert (config["num_hidden_layers"], config["tie_word_embeddings"], config["attention_bias"]) == (1, False, False)
    assert (config["vocab_size"], config["hidden_size"], config["rope_theta"]) == (VOCABULARY, HIDDEN, 50.0)
    parsed = AutoConfig.from_pretrained(folder)
    assert (parsed.model_type, parsed.dtype, parsed.rope_parameters["rope_theta"]) == ("llama", torch.float64, 50.0)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in LlamaDecoderLayer(parsed, 0).state_dict().items():
        if name != "input_layernorm.weight":
            width = [inputs * HIDDEN] if name[10:16] in ("q_proj", "k_proj", "v_proj") else list(tensor.shape[1:])
            assert shapes.pop(f"{prefix}{name}") == [len(tensor), *width]
    return shapes


SERVED = {"num_attention_heads": 4}  # LlamaConfig needs a divisor of the hidden size


@pytest.mark.parametrize("settings", [{}, {"draft_size": 5}, {"bias": True}])
def test_servers_can_read_an_eagle_head(tmp_path, settings):
    """vLLM has no bias of fc, so a head with one does not name vLLM's class. SGLang needs one."""
    bias = "bias" in settings
    save_head(made("eagle", layer=SERVED, **settings), tmp_path)
    config, tensors = read(tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"][: 1 if bias else 2]
    assert config["draftless"]["bias"] == bias == bool(tensors["fc.bias"].any())
    assert config["max_position_embeddings"] == 131_072
    # vLLM refuses unknown tensors such as lm_head
    assert check_layer(tmp_path, "layers.0.", 1) == {"fc.weight": [HIDDEN, 2 * HIDDEN], "fc.bias": [HIDDEN]}


@pytest.mark.parametrize("settings", [{}, {"draft_size": 5}, {"output": "target"}])
@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_servers_can_read_an_eagle3_head(tmp_path, settings, scaling):
    head = made("eagle3", layer={**SERVED, "rope_scaling": scaling}, max_position_embeddings=512, **settings)
    save_head(head, tmp_path)
    config, tensors = read(tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["max_position_embeddings"] == 512
    assert config["draft_vocab_size"] == (None if head.output == "target" else head.draft_size)
    assert (config[READ], config["eagle_config"][READ]) == ([2, 5, 9], [1, 4, 8])
    assert config["num_aux_hidden_states"] == 3
    assert not any(config.get(flag) for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
    assert (config["rope_scaling"] or {}).get("rope_type", "default") == config["rope_parameters"]["rope_type"]
    expected = {f"midlayer.{name}.weight": [HIDDEN] for name in ("input_layernorm", "hidden_norm")}
    expected |= {"fc.weight": [HIDDEN, 3 * HIDDEN], "norm.weight": [HIDDEN]}
    if head.output != "target":
        expected["lm_head.weight"] = [head.draft_size, HIDDEN]
    if head.token_map is not None:
        expected |= {"d2t": [5], "t2d": [VOCABULARY]}
        assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
        assert (tensors["d2t"] + torch.arange(5)).equal(head.token_map), "offsets"
        assert tensors["t2d"].nonzero().flatten().equal(head.token_map)
    assert check_layer(tmp_path, "midlayer.", 2) == expected


# ---- when files are replaced ----


def save_interrupted(head: Any, folder: Path, name: str, calls: int, is_full: bool) -> int:
    """Save a head in a process whose `calls`-th call of os.`name` finds a full disk or kills it; its exit status."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    real, left = getattr(os, name), [calls]

    def interrupt(*arguments: Any) -> None:
        left[0] -= 1
        if left[0]:
            real(*arguments)
        elif is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, name, interrupt)
    try:
        save_head(head, folder)
    except OSError as error:
        os._exit("No space left" in str(error))
    finally:
        os._exit(0)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize(("name", "is_full"), [("fsync", True), ("replace", True), ("replace", False)])
def test_an_interrupted_save_leaves_a_whole_head(tmp_path, name, is_full, calls):
    """The old head loads until the weights are replaced, then the new one, even if config.json is still the old one."""
    old, new = made("medusa", **ORIGIN), made("hydra", output="target", draft_size=9)
    save_head(old, tmp_path / "old")
    for folder in (tmp_path / "old", tmp_path / "new"):
        status = save_interrupted(new, folder, name, calls, is_full)
        assert os.WEXITSTATUS(status) == 1 if is_full else os.WTERMSIG(status) == signal.SIGKILL
        if calls == 1 and folder.name == "new":
            with pytest.raises(ValueError, match="it holds none of"):
                load_head(folder)
        else:
            assert_same(load_head(folder), old if calls == 1 else new)
        assert not is_full or {*os.listdir(folder)} <= {*FILES}
        save_head(new, folder)
        assert sorted(os.listdir(folder)) == FILES and read(folder)[0]["model_type"] == "hydra"


def test_saving_replaces_only_a_saved_head(tmp_path):
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path / "target")
    before = (tmp_path / "target" / "model.safetensors").read_bytes()
    (tmp_path / "published").mkdir()
    write(tmp_path / "published", "medusa_lm_head.pt", name_medusa(made("medusa", output="own")), MEDUSA)
    (tmp_path / "file").touch()
    for name, fault in (
        ("target", r"holds something else \(model.safetensors, config.json\)"),
        ("published", "holds something else"),
        ("file", "it is a file; name a folder"),
    ):
        with pytest.raises(ValueError, match=fault):
            save_head(made("medusa"), tmp_path / name)
    assert (tmp_path / "target" / "model.safetensors").read_bytes() == before
