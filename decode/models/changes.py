"""Notices that a model has changed since a target was made from it: its form, its mode, its weights, its adapters.

What is computed from weights (kept texts, packed copies, graphs) is right for these weights alone.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from operator import is_, itemgetter
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.models.compatibility import (
    TRAINING,
    in_training,
    refuse_activated_adapters,
    refuse_merged_adapters,
)
from decode.weights.layers import sample

FORM = (  # of a config: what a target reads once
    *("vocab_size", "hidden_size", "num_hidden_layers", "layer_types", "sliding_window", "attention_chunk_size"),
    *("max_position_embeddings", "rope_parameters", "_attn_implementation"),
)
ADAPTER = "_disable_adapters", "_active_adapter", "merged_adapters", "scaling"  # of a layer of peft
WRITTEN, MOVED = "written", "moved"  # to the same tensors; to other tensors, modules or adapters


class Snapshot:
    """A model as it was. It holds the model's parts, but not the model itself.

    Parameters and persistent buffers are compared: which tensors they are, where these lie, and torch's version of
    each. Writing through `.data` changes none of these. Non-persistent buffers are left out, because some models
    rebuild them in a forward pass. So are the tensors of modules that accelerate moves between devices.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules, config = [*model.modules()], model.config.get_text_config(decoder=True)
        still = [module for module in modules if not hasattr(module, "_hf_hook")]
        self._config, self.form = config, describe_form(model)
        # Hundreds of dicts are compared in each step. A loop of Python's would take three times as long.
        children, own = [each._modules for each in modules], [each._parameters for each in still]
        self._empty = [each for each in (*children, *own) if not each]
        self._children, self._dicts = [each for each in children if each], [each for each in own if each]
        self._held_children = [*map(dict, self._children)]
        self._held = [*chain.from_iterable(map(dict.values, self._dicts))]
        self._buffers = [
            (each._buffers, name, buffer)
            for each in still
            for name, buffer in each._buffers.items()
            if name not in each._non_persistent_buffers_set
        ]
        found = {id(each): each for each in (*self._held, *(buffer for *_, buffer in self._buffers))}
        tensors = [each for each in found.values() if isinstance(each, Tensor)]
        self._placed = [each for each in tensors if _has(each, Tensor.data_ptr)]
        self._versioned = [each for each in tensors if _has(each, lambda tensor: tensor._version)]
        plain = [each for each in tensors if type(each) in (Tensor, nn.Parameter) and not each.is_meta]
        self._plain = [each for each in plain if _has(each, lambda tensor: tensor.detach().flatten()[:1].double())]
        self._marks, self._samples = self._read_marks(), self._read_samples()
        parts = modules[1:]  # the first one is the model
        self.adapted = [each for each in parts if hasattr(each, ADAPTER[0])]
        self._adapters = self._read_adapters()
        modal = [each for each in parts if in_training(each) is not None]
        self.modes = [vars(each) for each in modal if not type(each).__module__.startswith("decode.")]  # ours have none
        values, renamed = vars(config), getattr(config, "attribute_map", {})
        names = {name: renamed.get(name, name) for name in FORM}
        known = [name for name, own in names.items() if own in values]
        self._names, self._settings = [names[name] for name in known], [self.form[name] for name in known]
        self._properties = [name for name in FORM if name not in known and hasattr(type(config), name)]
        self._absent = {*FORM}.difference(known, self._properties)

    def find_change(self, deep: bool) -> str | None:
        """What has changed of the weights and adapters: `WRITTEN`, `MOVED` or nothing.

        deep: whether to compare some elements of each tensor, too.
        """
        if self._children != self._held_children or any(self._empty):
            return MOVED
        held = chain.from_iterable(map(dict.values, self._dicts))
        if sum(map(len, self._dicts)) != len(self._held) or not all(map(is_, self._held, held)):
            return MOVED
        if any(held.get(name) is not buffer for held, name, buffer in self._buffers):
            return MOVED
        (places, versions), (old_places, old_versions) = self._read_marks(), self._marks
        if places != old_places or (self.adapted and self._read_adapters() != self._adapters):
            return MOVED
        if versions != old_versions or (deep and not _equal(self._samples, self._read_samples())):
            return WRITTEN
        return None

    @property
    def has_other_settings(self) -> bool:
        """Whether one of the config's settings `FORM` has changed."""
        values = vars(self._config)  # faster than `getattr`
        if [*map(values.get, self._names)] != self._settings or not values.keys().isdisjoint(self._absent):
            return True
        return any(getattr(self._config, name, None) != self.form[name] for name in self._properties)

    def _read_marks(self) -> tuple[list[int], list[int]]:
        return [each.data_ptr() for each in self._placed], [each._version for each in self._versioned]

    @torch.no_grad()
    def _read_samples(self) -> list[Tensor]:
        parts: dict[torch.device, list[Tensor]] = {}
        for each in self._plain:
            parts.setdefault(each.device, []).append(sample(each).double())
        return [torch.cat(each) for each in parts.values()]

    def _read_adapters(self) -> list[Any]:
        values = (getattr(layer, name, None) for layer in self.adapted for name in ADAPTER)
        return [
            [*each.items()] if isinstance(each, dict) else [*each] if isinstance(each, list) else each
            for each in values
        ]


class ModelWatch:
    """Compares a model with what it was. It does not keep the model alive. Threads may share it, one at a time if they
    hold its lock.

    changes: of the weights since all that was computed from them was right, as `Snapshot.find_change` tells them.
    version: how often they changed. moves: how often to other tensors, modules or adapters.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.version, self.moves, self.changes, self.lock = 0, 0, set[str](), RLock()
        self._snapshots: WeakKeyDictionary[PreTrainedModel, Snapshot] = WeakKeyDictionary({model: Snapshot(model)})

    @property
    def model(self) -> PreTrainedModel | None:
        """The model; None if it is gone."""
        return next(iter(self._snapshots), None)

    def look(self, deep: bool = False) -> int:
        """The version now. deep: as in `Snapshot.find_change`.

        Raises ValueError if the model is in training mode, has another form, or would change in its next pass.
        """
        with self.lock:
            for model, snapshot in self._snapshots.items():  # one, if the model still is
                if model.training or any(map(itemgetter("training"), snapshot.modes)):
                    raise ValueError(TRAINING)
                if snapshot.adapted:
                    refuse_merged_adapters(snapshot.adapted)
                change = snapshot.find_change(deep)
                if change or deep or snapshot.has_other_settings:
                    _refuse_form(snapshot.form, describe_form(model))
                if change:
                    now = Snapshot(model)
                    refuse_activated_adapters(now.adapted)
                    self._snapshots[model] = now
                    self.changes.add(change)
                    self.version += 1
                    self.moves += change == MOVED
                break
            return self.version


def describe_form(model: PreTrainedModel) -> dict[str, Any]:
    """What a target reads of a model once, by name. Lists and dicts are copied, because they could be changed."""
    config = model.config.get_text_config(decoder=True)
    read = {name: deepcopy(getattr(config, name, None)) for name in FORM}
    return read | {"dtype": model.dtype, "device": model.device}


def _refuse_form(before: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if before[name] != value:
            raise ValueError(
                f"the model has changed since this target was made ({name} was {before[name]}, and is {value}); make a "
                "new one: Target(model, tokenizer)"
            )


def _has(tensor: Tensor, read: Any) -> bool:
    """Whether this can be read of a tensor: some of torchao's have no place, inference tensors have no version, and
    some dtypes are read by nothing."""
    try:
        read(tensor)
    except RuntimeError:
        return False
    return True


def _equal(before: list[Tensor], now: list[Tensor]) -> bool:
    """NaN counts as equal to NaN."""
    pairs = zip(before, now, strict=True)
    return all(bool(((old == new) | (old.isnan() & new.isnan())).all()) for old, new in pairs)
