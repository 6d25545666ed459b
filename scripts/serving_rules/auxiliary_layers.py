"""Rules for the target layers that an EAGLE-3 head reads (auxiliary layers), in vLLM 0.33 and SGLang 0.5.23.

vLLM reads a list at the top of the config: L is the output of the first L layers. SGLang reads one in `eagle_config`:
v is the output of layer v, counted from 0, so L = v + 1. Without its list, each engine reads L = 2, n // 2, n - 3 of n.
"""

from __future__ import annotations

from collections.abc import Iterator

from decode import Target
from heads.formats.eagle3 import READ
from heads.formats.layout import extent, number, section
from scripts.serving_rules.folder import Engine, Finding, HeadFolder, error, warning

Layers = list[int]
REMEDY = f"write {READ} at the top of config.json, and the same numbers minus 1 in eagle_config"


def check_layers_read(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    top, nested = read_lists(folder)
    layers = target.config.num_hidden_layers
    default = [2, layers // 2, layers - 3]
    if top is None and nested is None:
        text = f"config.json has no {READ}; engines read {default} of this target's {layers} layers"
        if sorted({*default}) != default:
            yield error("both", "aux-layer-ids-default", f"{text}, which are not three layers: {REMEDY}")
        else:
            yield warning("both", "aux-layer-ids-default", f"{text}; if it was trained with these, {REMEDY}")
    elif top is not None and nested is not None and top != nested:
        hint = " (one list seems to use the other's convention)" if [layer - 1 for layer in nested] == top else ""
        text = f"vLLM would read the outputs of the first {top} layers, SGLang of {nested}{hint}: {REMEDY}"
        yield error("both", "aux-layer-ids", text)
    elif not folder.is_speculators and top != nested:
        yield from _check_single_list(top or nested or [], "sglang" if nested is None else "vllm", default)
    read = top or nested or default
    if not 0 <= min(read) <= max(read) <= layers:
        text = f"it reads the outputs of the first {read} layers, and the target has {layers}; it is for another target"
        yield error("both", "aux-layer-range", text)
    elif max(read) == layers:
        text = f"it reads the output of the last layer ({layers}), which engines do not record: train with lower ones"
        yield warning("both", "aux-layer-last", text)


def read_lists(folder: HeadFolder) -> tuple[Layers | None, Layers | None]:
    """vLLM's and SGLang's list, both in vLLM's convention. Raises ValueError if one is not a list of whole numbers."""
    found: list[Layers | None] = []
    for config, shift in ((folder.config, 0), (section(folder.config, "eagle_config"), 1)):
        listed = config.get(READ)
        if listed is not None and (not isinstance(listed, list) or not all(type(layer) is int for layer in listed)):
            raise ValueError(f"config.json has {READ}: {listed!r}; it must be a list of layers")
        found.append([layer + shift for layer in listed] if listed else None)
    return found[0], found[1]


def _check_single_list(listed: Layers, lacking: Engine, default: Layers) -> Iterator[Finding]:
    """One engine lacks its list, and nothing shows whether the other list was written in its own convention."""
    place, shift = ("at the top of config.json", -1) if lacking == "vllm" else ("in eagle_config", 1)
    if listed != default:
        text = f"there is no {READ} {place}, so it would read {default}, not {listed}: {REMEDY}"
        yield error(lacking, "aux-layer-ids", text)
    if [layer + shift for layer in listed] == default:
        text = f"in the other convention, its {READ} would be the usual {default}: keep the one with the higher tau"
        yield warning("both", "aux-layer-ids-convention", text)


def check_layer_number(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """vLLM's Qwen3 class counts the list at the top. Others count the nested list, or read num_aux_hidden_states."""
    top, nested = read_lists(folder)
    stated = number(folder.config, "num_aux_hidden_states")
    width = int(number(folder.layer_config, "target_hidden_size") or folder.read_size("hidden_size"))
    columns = extent(folder.shapes, ["fc.weight"], 1, 0)
    qwen = "qwen3" in str(folder.layer_config.get("model_type"))
    counts = {count for count in (stated, len(nested or ())) if count} or {len(top) if qwen and top else 3}
    if any(count * width != columns for count in counts):
        expected = " or ".join(f"{count} x {width}" for count in sorted(counts))
        text = f"fc.weight has {columns} columns, not {expected}: write num_aux_hidden_states and target_hidden_size"
        yield error("both", "num-aux-hidden-states", text)


AUXILIARY_LAYER_RULES = (check_layers_read, check_layer_number)
