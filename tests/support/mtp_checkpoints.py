"""Checkpoints of tiny models with an MTP module, in every layout that is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models import tiny

# The published names of the token's norm, the state's norm, the projection and the last norm, and of what surrounds
# these and the layer's own tensors. {}: the number of the target's layers.
LAYOUTS = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm", "model.layers.{}.", "model.layers.{}."),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "mtp.", "mtp.layers.0."),
    "mimo": (
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        *("model.mtp_layers.0.", "model.mtp_layers.0."),
    ),
}
CHECKPOINTS = {
    "deepseek_v3": "deepseek",
    "glm4_moe": "deepseek",
    "qwen3_next": "qwen",
    "qwen3_5_text": "qwen",
    "qwen3_5_moe_text": "qwen",
    "qwen2": "mimo",
}
Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def unchanged(tensors: dict[str, Tensor], config: dict[str, Any]) -> None: ...


def make_checkpoint(
    kind: str, folder: Path, change: Change = unchanged, model: Any = None
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A tiny model saved with an MTP module, whose layer is a copy of the model's last. Returns the module's parts."""
    model = tiny(kind) if model is None else model
    layers, size = model.config.num_hidden_layers, model.config.hidden_size
    model.save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    *names, outer, inner = (name.format(layers) for name in LAYOUTS[CHECKPOINTS[kind]])
    shapes = ([size], [size], [size, 2 * size], [size])
    drawn = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(model.dtype) / shape[-1] ** 0.5
        for shape in shapes
    ]
    last = f"model.layers.{layers - 1}."
    copied = {name.replace(last, inner): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    tensors |= copied | {f"{outer}{name}.weight": tensor for name, tensor in zip(names, drawn, strict=True)}
    if CHECKPOINTS[kind] == "deepseek":  # copies of the target's matrices
        given = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        tensors |= {f"{outer}{own}.weight": tensors[f"{name}.weight"].clone() for own, name in given.items()}
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return model, dict(zip(("enorm", "hnorm", "eh_proj", "norm"), drawn, strict=True))


def nest(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """As a model that sees pictures, too."""
    for name in list(tensors):
        if name.startswith("model."):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
    tensors["model.visual.layers.2.fc.weight"] = torch.ones(2, 2)
    inner = dict(config)
    config.clear()
    config |= {"model_type": "qwen3_5", "text_config": inner}
