"""The models of a GPU report: the one that the options name, and a large one with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from decode import Target
from decode.cpu.acceleration import accelerate
from scripts.benchmark.options import name_model
from scripts.shared.options import ModelOptions, load_model_only

# The shape of Llama 3.1 8B. Speed does not depend on the weights' values.
LARGE: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
# In its place on a CPU, where a report only shows that the command works.
TINY: dict[str, Any] = {
    **LARGE,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ROOM = 0.8  # the share of the free memory that weights may take: caches and activations need the rest


@dataclass(frozen=True)
class Subject:
    """A model that is measured. weight_bytes: what a forward pass over one node reads of its weights."""

    name: str
    target: Target
    weight_bytes: int
    is_default: bool = False  # pretrained heads fit


def load_subjects(options: ModelOptions, missing: list[str]) -> Iterator[Subject]:
    """The models one after another, so that each can be freed. What does not fit is noted in `missing`.

    Raises ValueError if the first one cannot be loaded.
    """
    model, tokenizer = load_model_only(options, accelerate="off")
    size = count_read_bytes(model)
    target = Target(accelerate(model, options.accelerate), tokenizer)
    device, dtype = target.device, target.dtype
    yield Subject(name_model(options), target, size, options.model is None)
    del model, target
    on_gpu = device.type == "cuda"
    config = LlamaConfig(**(LARGE if on_gpu else TINY))
    name = "8B shape, random weights" if on_gpu else "tiny shape, random weights"
    needed, free = count_bytes(config, dtype), free_memory(device)
    if needed > ROOM * free:
        missing.append(f"{name}: its weights take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
        return
    with torch.device(device):
        random = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    size = count_read_bytes(random)
    yield Subject(name, Target(accelerate(random, options.accelerate)), size)


def with_dtype(options: ModelOptions) -> ModelOptions:
    """The options with bfloat16 unless they name another number format."""
    return replace(options, dtype=options.dtype or "bfloat16")


def count_read_bytes(model: PreTrainedModel) -> int:
    """The bytes of the weights that a pass over one node reads: all but the input embeddings, unless they are tied."""
    embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    unread = 0 if output is embeddings else embeddings.nbytes
    return sum(parameter.nbytes for parameter in model.parameters()) - unread


def count_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
    """The bytes of a model's weights, without allocating them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return sum(parameter.nbytes for parameter in model.parameters())


def free_memory(device: torch.device) -> int:
    """The bytes that are free on the device."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])
