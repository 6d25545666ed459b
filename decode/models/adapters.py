"""Adapters in peft's folders: which base model they are for, and merging them into its weights.

peft is an extra, so it is imported where it is needed.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decode.models.default_model import NAME
from decode.models.stock_model import copy_modules
from decode.weights.gguf.description import is_installed

PLAIN = torch.float64, torch.float32, torch.bfloat16, torch.float16
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"  # in an adapter's config
DEFAULT_BASE = f"draftless:{NAME}"  # as the base: the default model, whose file is elsewhere on another machine
SELECTED = "draftless_selected"  # the name of an adapter in the copy of `select_adapter`
PEFT_ADVICE = 'adapters need the peft package: run pip install "draftless[lora]"'


def is_adapter(name: str | PathLike[str]) -> bool:
    """Whether this is a local folder with an adapter."""
    return (Path(name) / ADAPTER).is_file()


def require_peft() -> None:
    """Raise ValueError with advice if the package peft is missing."""
    if not is_installed("peft"):
        raise ValueError(PEFT_ADVICE)


def name_base(name: str | None) -> str:
    """What the config of an adapter calls its base model, which was loaded by this name."""
    if name is None:
        return DEFAULT_BASE
    return os.path.abspath(name) if Path(name).exists() else name  # links stay: those of the hub's cache have no suffix


def find_base(folder: Path) -> str | None:
    """The name of the model that an adapter is for; None is the default model.

    Raises ValueError if it names none, or a revision of it.
    """
    config = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    base, revision = config.get(BASE), config.get("revision")
    if revision not in (None, "main"):
        raise ValueError(f"its base model is revision {revision!r} of {base}; download that, and name its folder there")
    if not base or Path(base).resolve() == folder.resolve():
        raise ValueError(f"its {ADAPTER} must name the base model in {BASE}")
    return None if base == DEFAULT_BASE else str(base)


def wrap(model: PreTrainedModel, config: Any) -> Any:
    """A `peft.PeftModel` around a model, whose layers get new adapters by a config of peft. The model stays frozen.

    Raises ValueError if it has adapters already, as transformers adds those of a hub's repository.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError("the model has adapters already; merge them first, or download their folder and name it")
    with warnings.catch_warnings():  # peft asks for what transformers renames
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return PeftModel(model, config)


def select_adapter(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """A copy of a model's modules with one adapter, which is active, and no other. Tensors are shared.

    Raises ValueError for an adapter that the model does not have, and if one is merged into its weights.
    """
    known = list_adapters(model)
    if name not in known:
        has = f"; it has {', '.join(sorted(known))}" if known else ""
        raise ValueError(f"the model has no adapter {name!r}{has}")
    own = copy_modules(model)
    layers = _list_layers(own)
    if any(getattr(layer, "merged_adapters", None) for layer in layers):
        raise ValueError("an adapter is merged into the weights; call unmerge_adapter() first")
    for layer in layers:
        _keep_adapter(layer, name, known)
    return own


def list_adapters(model: PreTrainedModel) -> set[str]:
    """The names of a model's adapters."""
    return set[str]().union(*map(_list_names, _list_layers(model)))


def _list_layers(model: PreTrainedModel) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return [each for each in model.modules() if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def _list_names(layer: Any) -> set[str]:
    return {*(layer._adapters if hasattr(layer, "_adapters") else layer._get_available_adapters())}


def _keep_adapter(layer: Any, name: str, known: set[str]) -> None:
    """Drop a layer's other adapters, and rename this one: layers that differ in names alone share a compiled kernel.

    The layer's own `set_adapter` would also decide which of the shared tensors are trained.
    """
    has_it = name in _list_names(layer)
    of_module = layer._modules, layer._parameters, layer._buffers
    by_name = [each for each in vars(layer).values() if not any(each is other for other in of_module)]
    for by_adapter in [*by_name, *layer._modules.values()]:  # scales, matrices and so on
        if hasattr(by_adapter, "keys") and hasattr(by_adapter, "clear") and known & {*by_adapter.keys()}:
            kept = {SELECTED: by_adapter[name]} if name in by_adapter.keys() else {}  # noqa: SIM118 - of peft's BufferDict
            by_adapter.clear()
            by_adapter.update(kept)
    layer._active_adapter, layer._disable_adapters = [SELECTED], not has_it
    if hasattr(layer, "_adapters"):
        layer._adapters = {SELECTED} if has_it else set()


def apply_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with a folder's adapter merged into its weights, in place.

    Raises ValueError for a prompt-learning adapter, and for one of another model.
    """
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    if config.is_prompt_learning:
        raise ValueError("it is a prompt-learning adapter; only adapters within layers, such as LoRA, can be merged")
    adapted = wrap(model, config)
    report = adapted.load_adapter(str(folder), "default", torch_device="cpu")
    for keys, fault in ((report.missing_keys, "lacks"), (report.unexpected_keys, "has unknown")):
        if keys:
            raise ValueError(f"the adapter {fault} weights: {', '.join(sorted(keys)[:3])}; is its base model another?")
    return merge_adapters(adapted)


@torch.no_grad()
def merge_adapters(adapted: Any) -> PreTrainedModel:
    """The model in a `peft.PeftModel` with its adapters merged into the weights, in place.

    Sums are in float64 and are rounded to float32, then to the weight's format. So weights and fingerprint depend
    neither on the device nor on the order of a sum. Embeddings that are tied stay so unless one of them has an adapter.

    Raises ValueError for a quantized or offloaded layer.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    owners = Counter(
        id(each) for module in adapted.modules() for each in module._parameters.values() if each is not None
    )
    for name, layer in list(adapted.named_modules()):
        if not isinstance(layer, BaseTunerLayer):
            continue
        base: Any = layer.get_base_layer()
        weights = [*base.parameters()]
        is_plain = [type(each) is nn.Parameter and each.dtype in PLAIN and not each.is_meta for each in weights]
        if not is_plain or not all(is_plain):
            raise ValueError(f"no adapter can be merged into {name}, which is quantized or offloaded")
        if owners[id(weights[0])] > 1:  # tied embeddings: the adapter is for this layer alone
            base.weight = nn.Parameter(base.weight.clone(), requires_grad=False)
        dtype = weights[0].dtype
        layer.double()
        layer.merge()
        layer.get_base_layer().float().to(dtype)  # peft exchanges a norm
    model: PreTrainedModel = adapted.unload()
    _untie(model)
    return model.eval()


def _untie(model: PreTrainedModel) -> None:
    """Let the config say so if input and output embeddings are no longer the same."""
    ends = [getattr(each, "weight", None) for each in (model.get_input_embeddings(), model.get_output_embeddings())]
    if all(each is not None for each in ends) and ends[0] is not ends[1]:
        for config in (model.config, model.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
