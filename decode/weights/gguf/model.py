"""Models from GGUF files: on a CPU their layers keep the weights as they are stored, in blocks of a few bits.

The architectures are those of transformers. Where blocks cannot be kept, the weights are unpacked.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import hf_hub_download
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decode.weights.blocks import BLOCKS, StoredExperts, StoredLayer, WeightStack
from decode.weights.gguf.description import describe, is_installed, make_generation_config, require_gguf
from decode.weights.gguf.file import GgufFile
from decode.weights.gguf.tokenizer import Vocabulary
from decode.weights.layers import cast, refuse_gaps

SHIFTED = {"gemma2", "gemma3", "nemotron"}  # their files hold 1 + the norms' weights
# Architectures whose linear layers are stored as transformers has them, rows of the first aside.
IN_BLOCKS = {"llama", "qwen2", "qwen3", "phi3", "starcoder2", "stablelm", "olmoe", "qwen3moe", *SHIFTED}
# Parameters of experts, and their parts in files.
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
ROTATED = {"llama"}  # rows of a head's queries and keys are stored in pairs
FREQUENCIES = "rope_freqs.weight"
LONG_FACTORS = {"rope_factors_long.weight", "rope_factors_short.weight"}
LLAMA3 = {  # of Llama 3.1 to 3.3; the factors in files are computed from these
    **{"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


def find_gguf(name: str) -> Path | None:
    """The GGUF file that a name means: a file, the only one in a folder without other weights, or one on the hub.

    Raises ValueError for a folder with several, and for one on the hub without the package gguf.
    """
    path = Path(name)
    if path.suffix == ".gguf":
        if path.is_file() or len(path.parts) < 3 or path.is_absolute():
            return path
        require_gguf()
        return Path(hf_hub_download("/".join(path.parts[:2]), "/".join(path.parts[2:])))
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not files or _has_other_weights(path):
        return None
    if len(files) > 1:
        raise ValueError(f"it has several GGUF files; name one of {', '.join(file.name for file in files[:9])}")
    return files[0]


def _has_other_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def load_gguf(
    path: Path, dtype: torch.dtype | str, *, in_blocks: bool, device_map: Any = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a GGUF file and its tokenizer.

    dtype: "auto" is float32. in_blocks: keep the weights in blocks, in layers that must be packed, where that is
    possible. Else they are unpacked.

    Raises ValueError for a file that cannot be read, or that transformers cannot read, and without the package gguf.
    """
    require_gguf()
    file = GgufFile.open(path)
    folder = describe(file)
    model = None if device_map is not None else load_in_blocks(file, folder)
    if model is None:
        model = _load_with_transformers(file, folder, dtype, device_map)
    elif not in_blocks:
        unpack_layers(model)
        model = cast(model, torch.float32 if dtype == "auto" else dtype)
    _scale_frequencies(file, model)
    model.generation_config = _read_generation_config(file, folder, model.config)
    model.name_or_path = model.config.name_or_path = str(path)
    # By a model's type, AutoTokenizer may choose a class that splits text in its own way.
    reader = AutoTokenizer if folder == path.parent else PreTrainedTokenizerFast
    return model, reader.from_pretrained(folder, trust_remote_code=False)


def _read_generation_config(file: GgufFile, folder: Path, config: Any) -> GenerationConfig:
    """That of the folder, or what the file's header names, or the config.

    The header's tokenizer may be missing or damaged if there is another next to the file.
    """
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    with contextlib.suppress(ValueError):
        return make_generation_config(Vocabulary(file))
    return GenerationConfig.from_model_config(config)


def _load_with_transformers(file: GgufFile, folder: Path, dtype: Any, device_map: Any) -> PreTrainedModel:
    with contextlib.redirect_stderr(io.StringIO()):  # hides short progress bars
        model, report = AutoModelForCausalLM.from_pretrained(
            file.path.parent,
            config=AutoConfig.from_pretrained(folder),
            gguf_file=file.path.name,
            quantization_config=GgufConfig(dequantize=True),  # else a machine with GGUF kernels keeps the blocks
            dtype=dtype,
            device_map=device_map,
            output_loading_info=True,
        )
    refuse_gaps(report)
    if file.architecture in IN_BLOCKS:
        _find_names(file, model)
    for key in ("quantization_config", "_model_name_or_path"):
        vars(model.config).pop(key, None)  # wrong for a saved model; transformers would refuse the first
    return model


def _share_blocks(model: PreTrainedModel) -> None:
    """Let a tied output layer have the embedding's blocks."""
    output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    are_stored = isinstance(output, StoredLayer) and isinstance(embeddings, StoredLayer)
    if are_stored and model.config.tie_word_embeddings:
        output.weight, output.stored = embeddings.weight, embeddings.stored


def unpack_layers(model: PreTrainedModel) -> None:
    """Give stored layers their values back, in place."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, StoredLayer):
            layer.module.weight = nn.Parameter(layer.stored.rows())
            model.set_submodule(path, layer.module)
        elif isinstance(layer, StoredExperts):
            for name, stack in layer.stored.items():
                setattr(layer.module, name, nn.Parameter(stack.dense()))
            model.set_submodule(path, layer.module)
    model.tie_weights()
    model.eval()


def restore_blocks(model: PreTrainedModel) -> None:
    """Give the layers of a model that transformers unpacked from a GGUF file their blocks back, in place.

    The file is the one that the model was loaded from, or in its folder, without other weights. A layer whose
    values are not exactly the file's stays.
    """
    name, place = model.config.name_or_path, Path(model.config.name_or_path)
    if not name or model.dtype != torch.float32 or _has_other_weights(place):
        return
    if not is_installed("gguf"):
        return  # then transformers unpacked nothing
    for path in [place] if place.suffix == ".gguf" else sorted(place.glob("*.gguf")):
        try:
            file = GgufFile.open(path)
            names = _find_names(file, model) if file.architecture in IN_BLOCKS else {}
        except (OSError, ValueError):
            continue  # another model's, or gone
        for layer, module in list(model.named_modules()):
            if not (type(module) is nn.Linear or isinstance(module, nn.Embedding)):
                continue
            if (found := names.get(f"{layer}.weight")) is None:
                continue
            (name,) = found
            weight: Any = module.weight
            stored = file.weight(name, _find_order(file, name, model.config))
            if weight.shape == file.tensors[name].shape and torch.equal(stored.rows(), weight.detach()):
                model.set_submodule(layer, StoredLayer(stored, module))
        _share_blocks(model)


def load_in_blocks(file: GgufFile, folder: Path) -> PreTrainedModel | None:
    """The model of a file in float32, whose linear layers and embeddings are still to be packed; None if it has others.

    folder: that of `describe`. Raises ValueError if the file lacks a weight of the model, or has others.
    """
    if file.architecture not in IN_BLOCKS:
        return None
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    names = _find_names(file, model)
    stored_in: dict[str, Any] = {}  # the paths of layers whose weights stay in blocks, and the weights
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        path, _, kind = name.rpartition(".")
        module, (first, *_) = model.get_submodule(path), names[name]
        _check_shapes(file, names[name], parameter)
        if kind == "weight" and (type(module) is nn.Linear or isinstance(module, nn.Embedding)):
            stored_in[path] = file.weight(first, _find_order(file, first, config))
        elif kind in STACKS:
            stack = WeightStack(tuple(map(file.weight, names[name])), len(parameter))
            stored_in.setdefault(path, {})[kind] = stack
        elif file.tensors[first].form in BLOCKS.values():
            return None  # a fused weight
        else:
            setattr(module, kind, nn.Parameter(_make_plain(file, first, config)))
    for path, stored in stored_in.items():
        form = StoredExperts if isinstance(stored, dict) else StoredLayer
        model.set_submodule(path, form(stored, model.get_submodule(path)))
    _share_blocks(model)
    return model.eval()


def _check_shapes(file: GgufFile, names: Sequence[str], parameter: Tensor) -> None:
    """Raise ValueError unless these tensors of the file are the parameter, or each its share of an expert's rows."""
    expected = (*parameter.shape,)
    if parameter.dim() == 3:
        expected = expected[0], expected[1] // len(names), expected[2]
    for name in names:
        if (found := file.tensors[name].shape) != expected:
            raise ValueError(f"{name} in {file.path.name} is {found}; the config asks for {expected}")


def _find_names(file: GgufFile, model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """The names in the file of each parameter of the model: one, but for the two halves of experts' first matrices.

    Raises ValueError for one without, and for others there.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    known = get_tensor_name_map(number, model.config.num_hidden_layers)
    names: dict[str, tuple[str, ...]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        path, _, kind = name.rpartition(".")
        parts = [f"{path}.{part}.weight" for part in STACKS.get(kind, ())] or [name]
        names[name] = tuple(known.get_name(part, try_suffixes=(".weight", ".bias")) or part for part in parts)
    if model.config.tie_word_embeddings:
        names["lm_head.weight"] = names["model.embed_tokens.weight"]
    used, positions = {*chain.from_iterable(names.values())}, {FREQUENCIES}
    if (getattr(model.config, "rope_parameters", None) or {}).get("rope_type") == "longrope":  # the config has them
        positions |= LONG_FACTORS
    missing, others = used - {*file.tensors}, {*file.tensors} - used - positions
    for found, fault in ((missing, "lacks weights of the model"), (others, "has weights that the model does not use")):
        if found:
            raise ValueError(f"{file.path.name} {fault}: {', '.join(sorted(found)[:3])}")
    return names


def _find_order(file: GgufFile, name: str, config: Any) -> Tensor | None:
    """Which row in the file is row i of the model's tensor; None if all are in order."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or file.architecture not in ROTATED:
        return None
    return torch.arange(file.tensors[name].shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()


def _make_plain(file: GgufFile, name: str, config: Any) -> Tensor:
    """A tensor as the model has it."""
    tensor, order = file.plain(name), _find_order(file, name, config)
    if file.architecture in SHIFTED and name.endswith("norm.weight"):
        tensor = tensor - 1
    return tensor if order is None else tensor[order]


def _scale_frequencies(file: GgufFile, model: PreTrainedModel) -> None:
    """Apply the factors of rotary embeddings that files of Llama 3.1 and later have.

    Not to frequencies that a config next to the file has scaled already.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    if FREQUENCIES in file.tensors and rope.get("rope_type", "default") == "default":
        factors = file.plain(FREQUENCIES)
        for module in model.modules():
            if (frequencies := getattr(module, "inv_freq", None)) is not None:
                frequencies.div_(factors)
                _describe_scaling(model.config, rope, frequencies, float(factors.max()))


def _describe_scaling(config: Any, rope: dict[str, Any], frequencies: Tensor, factor: float) -> None:
    """Give a config the settings that these frequencies follow from, if they are Llama 3's: copies are made from it."""
    described = copy(config)
    described.rope_parameters = rope | LLAMA3 | {"factor": factor}
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](described, frequencies.device)
    if torch.allclose(expected, frequencies, rtol=1e-5, atol=0):
        config.rope_parameters = described.rope_parameters
