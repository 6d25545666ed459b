"""Weights that are NaN or infinite: one line names the tensor. A float16 overflow is named, too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from decode import Sampling, Target, generate
from decode.models.loading import load_model
from heads import load_head, save_head
from proposers import NGramProposer, load_proposer
from scripts import check
from tests.support.drafting import make_head
from tests.support.models import tiny

FILE = "model.safetensors"


def spoil_file(folder: Path, name: str, value: float = torch.nan) -> Path:
    path = folder / FILE
    tensors = load_file(path)
    tensors[name].flatten()[5] = value
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("dtype", "accelerate"), [("float32", "packed"), ("float32", "off"), ("float64", "off"), ("bfloat16", "packed")]
)
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]
)
def test_a_model_names_its_bad_weight(
    name: str, dtype: str, accelerate: str, value: float, save_model: Callable[..., Path]
) -> None:
    folder = spoil_file(save_model(dtype=torch.float32), name, value)
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
    names = [
        name
        for name, tensor in load_file(tmp_path / "head" / FILE).items()
        if name != "fc.bias" and tensor.is_floating_point()
    ]
    for name in (names[0], names[-1]):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "head", folder)
        tensors = load_file(folder / FILE)
        tensors[name].flatten()[1] = torch.nan
        save_file(tensors, folder / FILE, read_metadata(folder / FILE))
        with pytest.raises(ValueError, match=f"cannot load a head from .*: values are NaN or infinite in .*: {name}"):
            load_head(folder)
        with pytest.raises(ValueError, match=name):
            load_proposer(folder, target)


def read_metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def test_check_reports_it(tmp_path: Path, save_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(dtype=torch.float32)
    target = Target(*load_model(model, accelerate="off"))
    save_head(make_head("medusa", target), tmp_path / "head")
    path = tmp_path / "head" / FILE
    tensors, metadata = load_file(path), read_metadata(path)
    name = next(iter(tensors))
    tensors[name].flatten()[1] = torch.nan
    save_file(tensors, path, metadata)
    with pytest.raises(SystemExit) as ended:
        check.main([str(path.parent), "--model", str(model), "--no-decode"])
    shown = capsys.readouterr()
    assert ended.value.code == 1 and name in shown.out and "NaN" in shown.out and "does-not-load" in shown.out


@pytest.mark.parametrize("temperature", [1e-40, 1e-31, 5e-324, float("inf"), float("nan"), -1e-40])
def test_temperatures_that_divide_by_too_little_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"it must be 0 .greedy. or a positive number, at least 1e-30"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("settings", [{"temperature": 1e-30}, {"top_p": 1e-12}, {"min_p": 1.0}, {"top_k": 1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_leaves_one_token_is_greedy(settings: dict[str, float], dtype: torch.dtype) -> None:
    target = Target(tiny("llama", dtype=dtype))
    sampling = Sampling(**{"temperature": 1.0, "seed": 1, **settings})
    expected = generate(target, [[3, 4, 5, 3, 4]], None, max_new_tokens=12)
    for proposer in (None, NGramProposer()):
        found = generate(target, [[3, 4, 5, 3, 4]], proposer, sampling=sampling, max_new_tokens=12)
        assert found[0].tokens == expected[0].tokens


@pytest.mark.parametrize("seed", [1 << 64, (1 << 70) + 3, -1])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    target = Target(tiny("llama"))
    sampling = Sampling(temperature=1.0, seed=seed)
    answers = [
        generate(target, [[3, 4, 5]], each, sampling=sampling, max_new_tokens=8) for each in (None, NGramProposer())
    ]
    assert answers[0][0].tokens == answers[1][0].tokens and len(answers[0][0].tokens) == 8
