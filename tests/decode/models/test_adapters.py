"""Folders with peft adapters as models: loaded, merged into the base that they name, and refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LNTuningConfig, LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import decode.models.adapters
from decode import Target, generate
from decode.models.adapters import ADAPTER, ADAPTER_WEIGHTS, BASE, merge_adapters, wrap
from decode.models.loading import check_model, load_model
from tests.support.gguf_files import write_model
from tests.support.models import tiny

TOKENS = torch.tensor([[5, 17, 40, 3, 88, 62, 9, 31]])
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8]]


def read(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def adapt(base: Path, folder: Path, model: Any = None, **settings: Any) -> nn.Module:
    """Write an adapter with random weights for the model in a folder, and return the adapted model in float32."""
    model = model or AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | settings)
    adapted = wrap(model, config)
    torch.manual_seed(0)
    for weight in adapted.parameters():
        if weight.requires_grad:
            nn.init.normal_(weight, std=0.1)
    config.base_model_name_or_path = str(base)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    return adapted.eval()


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_is_merged_and_accelerated(
    save_model: Callable[..., Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    base = save_model(dtype=torch.float32)
    adapted = adapt(base, tmp_path, **settings)
    target = Target.load(tmp_path)
    assert target.is_packed and target.stop_ids == {2} and target.tokenizer("ab")["input_ids"]
    torch.testing.assert_close(read(target.model), read(adapted), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(read(target.model), read(Target.load(base).model), atol=1e-2)
    assert {name for name, _ in load_model(tmp_path)[0].named_parameters()} == {
        name for name, _ in load_model(base)[0].named_parameters()
    }
    plain = generate(Target.load(tmp_path, accelerate="off"), PROMPTS, None, max_new_tokens=12)
    assert [each.tokens for each in generate(target, PROMPTS, None, max_new_tokens=12)] == [
        each.tokens for each in plain
    ]
    check_model(tmp_path)


def test_the_fingerprint_does_not_depend_on_the_format(save_model: Callable[..., Path], tmp_path: Path) -> None:
    """Of a checkpoint in bfloat16, and of a GGUF file, whose blocks bfloat16 does not hold."""
    write_model("llama", tmp_path / "model.gguf")
    for name, base in (("plain", save_model(dtype=torch.bfloat16)), ("blocks", tmp_path / "model.gguf")):
        whole, folder = load_model(base, dtype="float32")[0], tmp_path / name
        adapted = adapt(base, folder, whole)
        formats = {dtype: Target.load(folder, dtype=dtype) for dtype in ("float32", "bfloat16", "float64")}
        assert {target.dtype for target in formats.values()} == {torch.float32, torch.bfloat16, torch.float64}
        assert len({target.weights_fingerprint for target in formats.values()}) == 1
        torch.testing.assert_close(read(formats["float32"].model), read(adapted), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tuned_norms_are_merged_in_the_models_dtype(
    save_model: Callable[..., Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    base = save_model(dtype=dtype)
    tuned = get_peft_model(load_model(base)[0], LNTuningConfig(target_modules=["input_layernorm"]))
    with torch.no_grad():
        for weight in tuned.parameters():
            if weight.requires_grad:
                weight.add_(0.5)
    tuned.peft_config["default"].base_model_name_or_path = str(base)
    tuned.save_pretrained(str(tmp_path))
    merged = load_model(tmp_path)[0]
    assert len({weight.dtype for weight in merged.parameters()}) == 1
    torch.testing.assert_close(read(merged), read(tuned.eval()), rtol=1e-3, atol=1e-4)


def test_an_adapter_of_an_adapted_model(save_model: Callable[..., Path], tmp_path: Path) -> None:
    base, first, second = save_model(dtype=torch.float32), tmp_path / "first", tmp_path / "second"
    adapt(base, first)
    adapted = adapt(first, second, load_model(first)[0], target_modules=["k_proj"])
    torch.testing.assert_close(read(load_model(second)[0]), read(adapted), rtol=1e-3, atol=1e-4)


def test_what_cannot_be_merged_is_refused(
    save_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_model(dtype=torch.float32)
    adapt(base, tmp_path)
    config, weights = tmp_path / ADAPTER, tmp_path / ADAPTER_WEIGHTS
    text, content = config.read_text(), weights.read_bytes()

    def refuse(message: str, **changes: Any) -> None:
        config.write_text(json.dumps(json.loads(text) | changes))
        with pytest.raises(ValueError, match=message) as error:
            load_model(tmp_path)
        assert "\n" not in str(error.value)

    for name in (None, "", str(tmp_path)):
        refuse("must name the base model in base_model_name_or_path", **{BASE: name})
        with pytest.raises(ValueError, match="must name the base model"):
            check_model(tmp_path)
    refuse("there is no such folder or file", **{BASE: "nowhere/at/all"})
    refuse(r"the adapter has unknown weights: .*\.q_proj\.lora_A", target_modules=["down_proj"])
    refuse(r"the adapter lacks weights: .*\.up_proj\.lora_A", target_modules=["q_proj", "down_proj", "up_proj"])
    refuse("size mismatch", **{BASE: str(save_model(dtype=torch.float32, hidden_size=48))})
    for damaged, message in ((b"", "adapter_model.safetensors is empty"), (content[:99], "cannot load a model from")):
        weights.write_bytes(damaged)
        refuse(message)
    monkeypatch.setattr(decode.models.adapters, "is_installed", lambda _: False)
    refuse(r'run pip install "draftless\[lora\]"')


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of a model within peft
def test_virtual_tokens_are_refused(save_model: Callable[..., Path], tmp_path: Path) -> None:
    base = save_model(dtype=torch.float32)
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)  # of a class of its own
    config.base_model_name_or_path = str(base)
    adapted.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="it is a prompt-learning adapter"):
        load_model(tmp_path)


def test_offloaded_layers_are_refused() -> None:
    model = wrap(tiny("llama"), LoraConfig(target_modules=["q_proj"]))
    layer: Any = model.get_base_model().model.layers[1].self_attn.q_proj.base_layer
    layer.to("meta")
    with pytest.raises(
        ValueError, match=r"merged into .*layers\.1\.self_attn\.q_proj, which is quantized or offloaded"
    ):
        merge_adapters(model)


@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
def test_an_adapter_of_one_of_two_tied_embeddings_unties_them(
    save_model: Callable[..., Path], tmp_path: Path, end: str
) -> None:
    base = save_model(dtype=torch.float32, tie_word_embeddings=True)
    adapted = adapt(base, tmp_path, target_modules=["q_proj", end])
    target = Target.load(tmp_path)
    torch.testing.assert_close(read(target.model), read(adapted), rtol=1e-3, atol=1e-4)
    assert not target.config.tie_word_embeddings
    assert not torch.allclose(target.output_matrix, target.embedding_matrix, atol=1e-2)


def test_a_revision_of_the_base_and_adapters_on_adapters_are_refused(
    save_model: Callable[..., Path], tmp_path: Path
) -> None:
    adapt(save_model(dtype=torch.float32), tmp_path)
    config = json.loads((tmp_path / ADAPTER).read_text())
    (tmp_path / ADAPTER).write_text(json.dumps(config | {"revision": "abc"}))
    with pytest.raises(ValueError, match=r"its base model is revision 'abc' of .*; download that"):
        load_model(tmp_path)
    settings = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = tiny("llama")
    wrap(model, settings)
    with pytest.raises(ValueError, match="the model has adapters already; merge them first"):
        wrap(model, settings)
