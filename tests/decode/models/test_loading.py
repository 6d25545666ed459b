"""Loading models by name, models that accelerate has spread over memory and disk, and damaged files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from decode import Target, generate
from decode.models.loading import load_model
from heads import load_head, save_head
from proposers import NGramProposer, load_proposer
from tests.support.drafting import make_head
from tests.support.models import tiny

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8]]


@pytest.mark.parametrize("accelerate", ["off", "auto"])
@pytest.mark.parametrize("away", ["layers", "everything"])
def test_offloaded_models_generate_the_same_tokens(
    save_model: Callable[..., Path], tmp_path: Path, accelerate: str, away: str
) -> None:
    folder = save_model(num_hidden_layers=4)
    parts = ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(4)), "model.norm", "lm_head"]
    gone = parts if away == "everything" else ["model.layers.1", "model.layers.3"]
    device_map = {"model.rotary_emb": "cpu", **{part: "disk" if part in gone else "cpu" for part in parts}}
    spread = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, device_map=device_map, offload_folder=tmp_path
    )
    assert any(parameter.is_meta for parameter in spread.parameters())
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    expected = generate(Target(whole), PROMPTS, None, max_new_tokens=12)
    answers = generate(Target(spread, accelerate=accelerate), PROMPTS, NGramProposer(length=3), max_new_tokens=12)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]


IMAGES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
IMAGES |= {"num_position_embeddings": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="older ones were not tried")
@pytest.mark.parametrize(("name", "text"), [("qwen3_5", "qwen3_5_text"), ("lfm2_vl", "lfm2"), ("mistral3", "mistral")])
def test_a_model_that_sees_images_reads_text(save_model: Callable[..., Path], name: str, text: str) -> None:
    """A checkpoint of all parts: with a class for text alone (qwen3_5), and without."""
    shape = tiny(text).config.to_dict()
    config = AutoConfig.for_model(name, text_config=shape, vision_config=IMAGES)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float64).eval()
    folder = save_model()
    whole.save_pretrained(folder)
    expected = whole.generate(torch.tensor(PROMPTS[:1]), do_sample=False, max_new_tokens=12, eos_token_id=None)
    target = Target.load(folder, dtype=torch.float64)
    for prompts in (PROMPTS[:1], PROMPTS):
        answer, *_ = generate(target, prompts, NGramProposer(length=3), max_new_tokens=12, stop_ids=[])
        assert answer.prompt + answer.tokens == expected[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float16, "float16", "torch.float16"])
def test_a_dtype_or_its_name_is_taken(save_model: Callable[..., Path], dtype: str | torch.dtype) -> None:
    assert load_model(save_model(), dtype=dtype)[0].dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "unknown dtype 'float8'; choose one of float64, float32"),
        ({"dtype": torch.int8}, "unknown dtype 'int8'; choose one of float64, float32"),
        ({"device": "warp"}, "unknown device 'warp'"),
        ({"device": "meta"}, "device 'meta' is not supported"),
        ({"device": "cuda:97"}, "torch sees"),
        ({"name": "no/such/folder"}, "cannot load a model from"),
    ],
)
def test_unknown_settings_and_folders_are_refused_in_one_line(
    save_model: Callable[..., Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_model(**{"name": save_model(), **options})
    assert "\n" not in str(caught.value)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"
GGUF = r"the header of m-Q4_0\.gguf is damaged or cut off; fetch the file again"
WEIGHTS = "model.safetensors"
DAMAGED: dict[str, tuple[dict[str, bytes | None], str]] = {  # contents of files, None to remove them
    "weights in LFS": ({WEIGHTS: POINTER}, "model.safetensors is a Git LFS pointer, .* run git lfs pull"),
    "a shard in LFS": ({WEIGHTS: None, "model-00001-of-2.safetensors": POINTER}, "00001-of-2.safetensors is a Git LFS"),
    "a tokenizer in LFS": ({"tokenizer.json": POINTER}, "tokenizer.json is a Git LFS pointer"),
    "empty weights": ({WEIGHTS: b""}, "model.safetensors is empty; fetch it again"),
    "an empty config": ({"config.json": b""}, "config.json is empty"),
    "half the weights": ({WEIGHTS: b"half"}, "cannot load a model from"),
    "GGUF alone": ({WEIGHTS: None, "config.json": None, "m-Q4_0.gguf": b"GGUF"}, GGUF),
    "GGUF and a config": ({WEIGHTS: None, "m-Q4_0.gguf": b"GGUF"}, GGUF),
    "GGUF in LFS": ({WEIGHTS: None, "m-Q4_0.gguf": POINTER}, r"m-Q4_0\.gguf is a Git LFS pointer"),
    "two of GGUF": (
        {WEIGHTS: None, "a.gguf": b"GGUF", "b.gguf": b"GGUF"},
        r"it has several GGUF files; name one of a\.gguf, b\.gguf",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_files_that_are_no_weights_are_refused_by_name(save_model: Callable[..., Path], name: str) -> None:
    folder, (files, message) = save_model(), DAMAGED[name]
    for file, content in files.items():
        (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_model(save_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "m-Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=GGUF):
        load_model(tmp_path / "m-Q4_0.gguf")
    with pytest.raises(ValueError, match=r"it is a file; name the folder with config\.json"):
        load_model(save_model() / WEIGHTS)


def test_files_that_are_not_read_may_be_pointers(save_model: Callable[..., Path]) -> None:
    folder = save_model()
    for name in ("pytorch_model.bin", "model.onnx", "training_args.bin", "m-Q4_0.gguf"):
        (folder / name).write_bytes(POINTER)
    assert load_model(folder)[0].config.model_type == "llama"


@pytest.mark.parametrize("file", [WEIGHTS, "medusa_lm_head.pt", "model.safetensors.index.json"])
def test_heads_without_weights_are_refused_by_name(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(POINTER)
    with pytest.raises(ValueError, match=f"cannot load a head from .*{file} is a Git LFS pointer, .* run git lfs pull"):
        load_head(tmp_path)


# Weights that are NaN or infinite: one line names the tensor. A float16 overflow is named, too.


def spoil_file(folder: Path, name: str, value: float = torch.nan) -> None:
    path = folder / WEIGHTS
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
        Target.load(folder, dtype=dtype, accelerate=accelerate)
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
    tensors = load_file(tmp_path / "head" / WEIGHTS)
    names = [name for name, tensor in tensors.items() if name != "fc.bias" and tensor.is_floating_point()]
    for name in (names[0], names[-1]):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "head", folder)
        spoil_file(folder, name)
        with pytest.raises(ValueError, match=f"cannot load a head from .*: values are NaN or infinite in .*: {name}"):
            load_head(folder)
        with pytest.raises(ValueError, match=name):
            load_proposer(folder, target)
