"""Fingerprints: tell another model, vocabulary or chat template apart from the one that files were made with.

The same path may hold other weights tomorrow, and token ids mean nothing in another vocabulary. So answers, stores and
checkpoints carry the fingerprints of what they were made with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decode.requests.text import Tokenizer
from decode.weights.blocks import StoredExperts, StoredLayer

SAMPLES = 256  # elements of each parameter: reading all of a large model would take a minute


def fingerprint_weights(model: PreTrainedModel) -> str:
    """16 hex digits that depend on all parameters and their names, and on no dtype or device.

    Elements are compared as bfloat16, so that a model gets the same fingerprint in float32 and in bfloat16. Call it
    before layers are packed. A target keeps it, see `Target.weights_fingerprint`.
    """

    stored: dict[Any, Any] = {layer.weight: layer.stored for layer in model.modules() if isinstance(layer, StoredLayer)}
    for experts in (layer for layer in model.modules() if isinstance(layer, StoredExperts)):
        stored |= {experts._parameters[name]: stack for name, stack in experts.stored.items()}

    def describe() -> Iterable[bytes]:
        for name, parameter in model.named_parameters():
            yield f"{name}{tuple(parameter.shape)}".encode()
            chosen = torch.arange(0, parameter.numel(), max(1, parameter.numel() // SAMPLES))
            if parameter in stored:
                numbers = chosen % parameter.shape[-1]
                values = stored[parameter].rows(chosen // parameter.shape[-1]).gather(1, numbers[:, None])
            elif parameter.is_meta:
                continue
            else:
                is_quantized = type(parameter) is not nn.Parameter and hasattr(parameter, "dequantize")
                plain = parameter.dequantize() if is_quantized else parameter
                values = plain.detach().flatten()[:: max(1, parameter.numel() // SAMPLES)]
            yield values.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes()

    return _hash(describe())


def fingerprint_vocabulary(tokenizer: Tokenizer) -> str:
    """16 hex digits that depend on which token has which id."""
    return _hash([json.dumps(sorted(tokenizer.get_vocab().items())).encode()])


def fingerprint_template(tokenizer: Tokenizer) -> str | None:
    """16 hex digits that depend on the chat template; None without one."""
    template = tokenizer.chat_template
    return None if template is None else _hash([json.dumps(template, sort_keys=True).encode()])


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What has changed in the model, in words; "" if nothing has. Older files have no fingerprints, which is no change.

    before, now: fingerprints as `Target.fingerprints` names them, perhaps among other settings.
    """
    names = ("weights", "vocabulary", "template")
    changed = [name for name in names if name in before and name in now and before[name] != now[name]]
    return " and ".join(changed).replace("template", "chat template")


def _hash(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
