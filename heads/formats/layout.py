"""How a file names a head's tensors, and how shapes and config give the head's sizes.

Sizes that tensor names or shapes show are never taken from the config, because published configs get them wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads.layers import LayerConfig
from heads.vocabulary import HeadConfig, VocabularyHead

Shapes = Mapping[str, Sequence[int]]  # of a file's tensors, by name
ConfigDict = Mapping[str, Any]  # the content of config.json
OWN = "draftless"  # our section of config.json, and our key in the weights' metadata
MAP = "token_map"
EMBEDDING = "embed_tokens.weight"
MIDLAYER = "midlayer."  # an EAGLE-3 head's first layer
NO_SIZES = "kind", "origin", MAP  # entries of our section
PAIRS = "markov_head.markov_w2"  # rows of draft tokens, as those of an output matrix


class TargetSizes(NamedTuple):
    """The target's sizes, for files without them; None if they are unknown."""

    vocab_size: int | None
    layers: int | None


@dataclass(frozen=True)
class Layout:
    """A head as one file stores it."""

    config: HeadConfig
    renamed: Mapping[str, str] = field(default_factory=dict)  # prefixes of our names -> the file's, where they differ
    ignored: Set[str] = frozenset()  # tensors that the file can have and the head does not need
    tensors: Mapping[str, Tensor] | None = None  # by our names, if they are not the file's own


@dataclass(frozen=True)
class Format:
    """How folders store one kind of head. A kind that nobody publishes has the default.

    recognizes: whether a published file with these names of tensors has such a head. read: its layout, by the file's
    tensors and config and the sizes of the target. It raises ValueError if a size is unknown or the file contradicts
    itself. export: the tensors and the config of our folder. for_servers: tensors of our folder that only servers need.
    """

    recognizes: Callable[[Collection[str]], bool] = lambda names: False
    read: Callable[[Mapping[str, Tensor], ConfigDict, TargetSizes], Layout] | None = None
    export: Callable[[Any], tuple[dict[str, Tensor], dict[str, Any]]] = lambda head: (
        head.state_dict(),
        {"model_type": head.kind},
    )
    for_servers: frozenset[str] = frozenset()


def replace_prefix(name: str, replaced: Mapping[str, str]) -> str:
    """The name with the first of these prefixes that it has replaced, if any."""
    prefix = next((prefix for prefix in replaced if name.startswith(prefix)), "")
    return replaced.get(prefix, "") + name.removeprefix(prefix)


def find_shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    """The shapes of a file's tensors."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def rename(shapes: Shapes, renamed: Mapping[str, str]) -> Shapes:
    """The shapes by our names. renamed: as in `Layout`."""
    ours = {file: prefix for prefix, file in renamed.items()}
    return {replace_prefix(name, ours): shape for name, shape in shapes.items()}


def count(form: str, names: Iterable[str]) -> tuple[int, ...]:
    """For each {} of a form such as "blocks.{}.layers.{}.weight", 1 + its highest number; () if no name matches."""
    found = [match.groups() for match in map(_compile(form).fullmatch, names) if match]
    return tuple(1 + max(map(int, column)) for column in zip(*found, strict=True))


def extent(shapes: Shapes, forms: Iterable[str], axis: int, otherwise: int = 1) -> int:
    """The size of this axis in the first tensor that has it and a name of one of these forms.

    Missing tensors are reported later.
    """
    found = (shape for form in forms for name, shape in shapes.items() if _compile(form).fullmatch(name))
    return next((shape[axis] for shape in found if axis < len(shape)), otherwise)


def _compile(form: str) -> re.Pattern[str]:
    return re.compile(re.escape(form).replace(r"\{\}", r"(\d+)"))


def section(config: ConfigDict, name: str) -> ConfigDict:
    """An object inside the config; empty if missing. Raises ValueError if it is something else."""
    inner = config.get(name) or {}
    if not isinstance(inner, dict):
        raise ValueError(f"its config has {name}: {inner!r}; it must be an object")
    return inner


def number(config: ConfigDict, name: str) -> Any:
    """A positive number of the config; None if missing. Raises ValueError if it is something else."""
    value = config.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ValueError(f"its config has {name}: {value!r}; it must be a positive number")
    return value


def read_common(
    shapes: Shapes, hidden_size: int, matrices: Iterable[str], config: ConfigDict, given: int | None
) -> dict[str, Any]:
    """`HeadConfig`'s entries for a head with output matrices of these forms. given: the target's vocabulary size.

    Raises ValueError if that is needed and unknown, or if a draft vocabulary has no token map.
    """
    rows, mapped = extent(shapes, matrices, 0, 0), extent(shapes, [MAP], 0, 0)
    named, embedded = number(config, "vocab_size"), extent(shapes, [EMBEDDING], 0, 0)
    # With rows for tokens that the target does not have, in the output matrices too.
    is_padded = named is not None and embedded > named and named == given
    size = extent(shapes, ["t2d"], 0, 0) or (not is_padded and embedded) or named or (not mapped and rows) or given
    if not size:
        raise ValueError("it does not contain the target's vocabulary size; pass vocab_size=, or add it to its config")
    if embedded and (embedded < size or tuple(shapes[EMBEDDING][1:]) != (hidden_size,)):
        raise ValueError(f"wrong: {EMBEDDING} is {list(shapes[EMBEDDING])}, not {[size, hidden_size]}")
    if not mapped and rows not in (0, size, embedded):
        raise ValueError(f"missing: token_map or d2t, which must map its {rows} output rows to {size} tokens")
    return {
        "hidden_size": hidden_size,
        "vocab_size": int(size),
        "draft_size": None if mapped in (0, size) else mapped,
        "target_name": name_target(config),
    }


def name_target(config: ConfigDict) -> str | None:
    """The target of a published head, as configs of Medusa, Hydra, FlashMap and speculators name it."""
    verifier = section(section(config, "speculators_config"), "verifier")
    return config.get("base_model_name_or_path") or verifier.get("name_or_path") or config.get("target_model")


def find_first_layer(names: Iterable[str]) -> str:
    """What `MIDLAYER` is in a file with these names of tensors."""
    return MIDLAYER if any(name.startswith(MIDLAYER) for name in names) else "layers.0."


def read_own(config: type[HeadConfig], for_servers: Set[str], own: ConfigDict, names: Iterable[str]) -> Layout:
    """The layout of a folder of `save_head`, whose section of the config has all sizes.

    Raises ValueError if they are damaged.
    """
    settings = {name: value for name, value in own.items() if name not in NO_SIZES}
    try:
        for name in ("layer", "prefix"):
            if name in settings and (name == "layer" or settings[name] is not None):
                settings[name] = LayerConfig(**settings[name])
        settings |= {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
        return Layout(config(**settings), {MIDLAYER: find_first_layer(names)}, for_servers)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"its config's section {OWN} is damaged: {error}") from error


def read_token_map(tensors: Mapping[str, Tensor], own: ConfigDict) -> dict[str, Tensor]:
    """The tensors with a `token_map` [D], from EAGLE-3's `d2t` or `t2d`, or as listed in our section of the config.

    d2t [D] holds offsets: draft token i is the target's token i + d2t[i]. t2d [V] is true for the target's tokens in
    the draft vocabulary; it stays, because its length is V. Raises ValueError if they are malformed or differ.
    """
    found = dict(tensors)
    if (listed := own.get(MAP)) is not None:
        if not isinstance(listed, list) or not all(type(token) is int for token in listed):
            raise ValueError(f"its config's {MAP} must be a list of tokens")
        found[MAP] = torch.tensor(listed)
    marked = found["t2d"].flatten().nonzero().flatten() if "t2d" in found else None
    if (offsets := found.pop("d2t", None)) is not None:
        if offsets.ndim != 1 or offsets.is_floating_point():
            raise ValueError(f"its d2t is {list(offsets.shape)} of {offsets.dtype}; it must be a list of offsets")
        found[MAP] = offsets.long() + torch.arange(len(offsets))
        if marked is not None and not torch.equal(found[MAP].sort().values, marked):
            raise ValueError("its d2t and t2d are of different tokens; i + d2t[i] must be the tokens that t2d marks")
    elif marked is not None:
        found[MAP] = marked
    return found


def export_token_map(states: dict[str, Tensor], vocab_size: int) -> None:
    """Write a token map as servers read it, in place: offsets in d2t, and the target's tokens marked in t2d."""
    if MAP in states:
        tokens = states.pop(MAP)
        states["d2t"] = tokens - torch.arange(len(tokens), device=tokens.device)
        states["t2d"] = torch.isin(torch.arange(vocab_size), tokens.cpu())


def assemble(
    network: type[VocabularyHead], layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> VocabularyHead:
    """The head, from a file's tensors.

    Raises ValueError with the file's names of tensors that are missing, unexpected or wrong.
    """
    tensors = tensors if layout.tensors is None else layout.tensors
    make: Any = network
    with torch.device("meta"):  # parameters with shapes but no storage
        head: VocabularyHead = make(layout.config)
    expected = {name: list(state.shape) for name, state in head.state_dict().items()}
    names = {ours: replace_prefix(ours, layout.renamed) for ours in [*expected, MAP]}  # our names -> the file's
    states = {ours: tensors[name] for ours, name in names.items() if name in tensors}
    if EMBEDDING in states:
        _cut_padding(states, layout.config.vocab_size)
    if MAP in states:
        _sort_vocabulary(states, layout.config.vocab_size)
    wrong = []
    for ours, state in states.items():
        if list(state.shape) != expected[ours]:
            wrong.append(f"{names[ours]} is {list(state.shape)}, not {expected[ours]}")
        elif not state.is_floating_point() and ours != MAP:
            wrong.append(f"{names[ours]} is of {state.dtype}, not of a floating-point type")
    known = {*names.values(), *layout.ignored}
    faults = {
        "missing": [names[ours] for ours in expected if ours not in states],
        "unexpected": [name for name in tensors if name not in known],
        "wrong": wrong,
    }
    if found := [f"{fault}: {list_names(named)}" for fault, named in faults.items() if named]:
        raise ValueError("; ".join(found))
    if dtype is None:  # copies can have the target's
        others = (each for ours, each in states.items() if ours not in (EMBEDDING, "lm_head.weight"))
        dtype = next(each.dtype for each in others if each.is_floating_point())
    formats = {ours: choose_dtype(head, ours, dtype) for ours in states}
    states = {ours: convert(state, formats[ours], copy=True) for ours, state in states.items()}  # out of the file's map
    if bad := [names[ours] for ours, state in states.items() if not bool(state.isfinite().all())]:
        raise ValueError(f"values are NaN or infinite in {str(dtype).removeprefix('torch.')}: {list_names(bad)}")
    head.load_state_dict(states, assign=True)
    return head


def choose_dtype(head: VocabularyHead, name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which a head of this dtype holds the tensor with this name."""
    if dtype is not None and dtype.itemsize < 4 and any(part in name for part in head.in_float32):
        return torch.float32
    return dtype


def list_names(names: Sequence[str]) -> str:
    """The first four names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def convert(tensor: Tensor, dtype: torch.dtype | None, copy: bool = False) -> Tensor:
    """The tensor as contiguous memory in this dtype; integers keep theirs."""
    dtype = dtype if tensor.is_floating_point() else None
    return tensor.detach().to(dtype or tensor.dtype, copy=copy, memory_format=torch.contiguous_format)


def _cut_padding(states: dict[str, Any], vocab_size: int) -> None:
    """Drop the embeddings' rows for tokens that the target does not have, in place, and output rows for the same."""
    rows = len(states[EMBEDDING])
    for name, state in states.items():
        if name == EMBEDDING or (MAP not in states and name.startswith("lm_head") and len(state) == rows):
            states[name] = state[:vocab_size]


def _sort_vocabulary(states: dict[str, Any], vocab_size: int) -> None:
    """Sort the token map, and the rows of the output matrices with it, in place. A map of all tokens is dropped.

    Raises ValueError if the map is not a list of different tokens.
    """
    tokens = states.pop(MAP)
    valid = tokens.ndim == 1 and not tokens.is_floating_point() and tokens.unique().numel() == tokens.numel() > 0
    if not valid or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"its token_map must be a list of different tokens, each below {vocab_size}")
    tokens, order = tokens.long().sort()
    for name, rows in states.items():
        if name.startswith(("lm_head", PAIRS)) and rows.shape[:1] == tokens.shape:
            states[name] = rows[order]
    if len(tokens) < vocab_size:
        states[MAP] = tokens
