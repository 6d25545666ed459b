"""Weights that are NaN or infinite: one line names the tensor. A float16 overflow is named, too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from decode import Target
from decode.models.loading import load_model
from heads import load_head, save_head
from proposers import load_proposer
from tests.support.drafting import make_head
from tests.support.models import tiny

FILE = "model.safetensors"


def spoil_file(folder: Path, name: str, value: float = torch.nan) -> None:
    path = folder / FILE
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    tensors[name].flatten()[1] = value
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("name", "dtype", "accelerate", "value"),
    [
        ("model.layers.1.mlp.down_proj.weight", "float32", "packed", torch.nan),
        ("model.layers.1.mlp.down_proj.weight", "bfloat16", "packed", torch.inf),
        ("model.layers.0.self_attn.k_proj.weight", "float32", "packed", torch.inf),
        ("model.layers.0.self_attn.k_proj.weight", "float64", "off", torch.nan),
        ("model.norm.weight", "float32", "off", torch.nan),
        ("model.norm.weight", "bfloat16", "packed", torch.inf),
    ],
)
def test_a_model_names_its_bad_weight(
    name: str, dtype: str, accelerate: str, value: float, save_model: Callable[..., Path]
) -> None:
    folder = save_model(dtype=torch.float32)
    spoil_file(folder, name, value)
    with pytest.raises(ValueError, match=f"{name} has values that are NaN or infinite") as raised:
        Target(*load_model(folder, dtype=dtype, accelerate=accelerate))
    assert "\n" not in str(raised.value) and "linear op" not in str(raised.value)


def test_an_overflow_is_named() -> None:
    model = tiny("llama", dtype=torch.float32)
    model.model.norm.weight.data.fill_(30000)
    model.lm_head.weight.data *= 100
    with pytest.raises(ValueError, match=r"cannot be used in float16: .*its numbers overflow; try bfloat16 or float32"):
        Target(model.to(torch.float16))
    Target(model.to(torch.float32))


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle"])
def test_a_head_names_its_bad_tensor(kind: str, tmp_path: Path) -> None:
    target = Target(tiny("llama", dtype=torch.float32))
    save_head(make_head(kind, target), tmp_path / "head")
    tensors = load_file(tmp_path / "head" / FILE)
    names = [name for name, tensor in tensors.items() if name != "fc.bias" and tensor.is_floating_point()]
    for name in (names[0], names[-1]):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "head", folder)
        spoil_file(folder, name)
        with pytest.raises(ValueError, match=f"cannot load a head from .*: values are NaN or infinite in .*: {name}"):
            load_head(folder)
        with pytest.raises(ValueError, match=name):
            load_proposer(folder, target)
