"""Which of the target's layers an EAGLE-3 head reads, as vLLM 0.33 and SGLang 0.5.23 understand its config.

vLLM reads a list at the top of the config, in which L means the output of the first L layers; SGLang one within
`eagle_config`, in which v means the output of layer v, counted from 0: L = v + 1. Where its list is missing, either
takes (2, n // 2, n - 3), in vLLM's convention, of a target of n layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from decode import Target
from heads.formats.eagle3 import READ
from heads.formats.layout import extent, number, section
from scripts.check_folder import Engine, Finding, HeadFolder
from scripts.check_layer import take

Layers = list[int]
DEFAULT_COUNT = 3
WRITE = f"write {READ} at the top, and each less 1 within eagle_config"


def check_layers_read(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    top, nested = read_lists(folder)
    layers = target.config.num_hidden_layers
    default = [2, layers // 2, layers - 3]
    if top is None and nested is None:
        known = f"nothing says which layers it reads, and servers take {default} of this target's {layers}"
        if sorted({*default}) != default:
            yield Finding("error", "both", "aux-layer-ids-default", f"{known}, which are not three: {WRITE}")
        else:
            yield Finding("warning", "both", "aux-layer-ids-default", f"{known}; if it was trained so, {WRITE}")
    elif top is not None and nested is not None and top != nested:
        hint = " (one of them is in the other's convention)" if [layer - 1 for layer in nested] == top else ""
        text = f"vLLM would read the outputs of {top} layers, SGLang of {nested}{hint}: {WRITE}"
        yield Finding("error", "both", "aux-layer-ids", text)
    elif not folder.speculators:
        yield from _check_default(top, nested, default)
        yield from _check_convention(top, nested, default)
    yield from _check_range(top or nested or default, layers)


def read_lists(folder: HeadFolder) -> tuple[Layers | None, Layers | None]:
    """vLLM's list and SGLang's, both in vLLM's convention. Raises ValueError for what is no list of whole numbers."""
    found: list[Layers | None] = []
    for words, shift in ((folder.said, 0), (section(folder.said, "eagle_config"), 1)):
        given = words.get(READ)
        if given is not None and (not isinstance(given, list) or not all(type(layer) is int for layer in given)):
            raise ValueError(f"its config says {READ}: {given!r}; that must be a list of layers")
        found.append([layer + shift for layer in given] if given else None)
    return found[0], found[1]


def _check_default(top: Layers | None, nested: Layers | None, default: Layers) -> Iterator[Finding]:
    """One server has a list and the other has not."""
    engine: Engine = "vllm" if top is None else "sglang"
    given = nested if top is None else top
    if given is not None and given != default and None in (top, nested):
        place = "at the top of config.json" if engine == "vllm" else "within eagle_config"
        text = f"there is no {READ} {place}, so that it would read {default} and not {given}: {WRITE}"
        yield Finding("error", engine, "aux-layer-ids", text)


def _check_convention(top: Layers | None, nested: Layers | None, default: Layers) -> Iterator[Finding]:
    """One list alone does not say by whose convention it was written."""
    other = [layer + 1 for layer in top] if top else [layer - 1 for layer in nested or ()]
    if None in (top, nested) and other == default:
        text = (
            f"the one {READ} that there is says the outputs of {top or nested} layers, and in the other convention it "
            f"would say the usual {default}: decode with both, keep the one with the higher tau, and {WRITE}"
        )
        yield Finding("warning", "both", "aux-layer-ids-convention", text)


def _check_range(read: Layers, layers: int) -> Iterator[Finding]:
    if not 0 <= min(read) <= max(read) <= layers:
        text = f"it reads the outputs of {read} layers, and the target has {layers}; it is another target's"
        yield Finding("error", "both", "aux-layer-range", text)
    elif max(read) == layers:
        text = (
            f"it reads the output of all {layers} layers; servers note what enters a layer, and nothing does after the "
            "last: train with lower ones"
        )
        yield Finding("warning", "both", "aux-layer-last", text)


def check_number_read(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """Neither server counts the list at the top, but for vLLM's Qwen3 form."""
    top, nested = read_lists(folder)
    said = number(folder.said, "num_aux_hidden_states")
    width = int(number(folder.words, "target_hidden_size") or take(folder.words, "hidden_size"))
    columns = extent(folder.shapes, ["fc.weight"], 1, 0)
    qwen = "qwen3" in str(folder.words.get("model_type"))
    counts = {count for count in (said, len(nested or ())) if count} or {len(top) if qwen and top else DEFAULT_COUNT}
    if any(count * width != columns for count in counts):
        text = (
            f"fc.weight has {columns} columns, and servers count {' or '.join(map(str, sorted(counts)))} layers of "
            f"{width}: write num_aux_hidden_states, as many as are read, and target_hidden_size"
        )
        yield Finding("error", "both", "num-aux-hidden-states", text)


RULES = (check_layers_read, check_number_read)
