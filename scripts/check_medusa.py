"""What vLLM up to 0.32 takes for a Medusa head; vLLM 0.33 and SGLang have none, and no server has Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterator

from decode import Target
from heads.formats.layout import count
from scripts.check_folder import Finding, HeadFolder
from scripts.check_layer import take

PREFIX = "medusa_heads."  # the one that vLLM strips
KNOWN = re.compile(
    r"blocks\.\d+\.layers\.\d+\.(weight|bias)|\d+\.\d+\.linear\.(weight|bias)|\d+\.\d+\.weight"
    r"|lm_heads\.\d+\.weight|lm_head\.weight|token_map"
)
HEADS = ("num_heads", "medusa_num_heads")
LAYERS = ("num_hidden_layers", "num_layers", "medusa_num_layers")  # 1 where none is there
ITS_OWN, MODEL_TYPE = "MedusaModel", "medusa"
SHOWN = 3


def check_servers(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    text = "vLLM serves Medusa up to 0.32 only; 0.33 has removed it"
    yield Finding("warning", "vllm", "medusa-removed", text)
    text = "SGLang has no Medusa; use vLLM up to 0.32, or Draftless"
    yield Finding("warning", "sglang", "medusa-not-served", text)


def check_medusa(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    names = [name.removeprefix(PREFIX) for name in folder.tensors]
    if strange := [name for name in names if not KNOWN.fullmatch(name)]:
        text = f"tensors that vLLM passes over without a word: {', '.join(strange[:SHOWN])}; save it with Draftless"
        yield Finding("error", "vllm", "medusa-unknown-keys", text)
    if any(name.endswith(".bias") for name in names) and not folder.said.get("medusa_fc_bias"):
        text = "its blocks have biases, which are dropped unless config.json says medusa_fc_bias: true"
        yield Finding("error", "vllm", "medusa-bias-dropped", text)
    heads = next((folder.said[word] for word in HEADS if word in folder.said), None)
    layers = next((folder.said[word] for word in LAYERS if word in folder.said), 1)
    held, blocks = count_blocks(folder)
    if held != heads:
        text = f"the file has {held} heads and config.json says {heads}: write num_heads: {held}"
        yield Finding("error", "vllm", "medusa-head-count", text)
    if blocks != layers:
        text = (
            f"the file has {blocks} blocks a head, config.json says, or leaves to the default, {layers}; vLLM passes "
            f"over the others: write num_hidden_layers: {blocks}"
        )
        yield Finding("error", "vllm", "medusa-layer-count", text)
    said = (int(take(folder.said, "hidden_size")), int(take(folder.said, "vocab_size")))
    if said != (target.config.hidden_size, target.vocabulary):
        text = (
            f"config.json says, or leaves to defaults, hidden_size and vocab_size {said}; the target's are "
            f"{(target.config.hidden_size, target.vocabulary)}"
        )
        yield Finding("error", "vllm", "medusa-sizes", text)


def count_blocks(folder: HeadFolder) -> tuple[int, int]:
    """How many heads the file has, and how many blocks each, whatever its config says."""
    names = [name.removeprefix(PREFIX) for name in folder.tensors]
    forms = ("blocks.{}.layers.{}.weight", "{}.{}.linear.weight")
    found = [numbers for form in forms if (numbers := count(form, names))]
    return (found[0][0], found[0][1]) if found else (0, 0)


def check_names(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    if (kind := folder.said.get("model_type")) != MODEL_TYPE:
        text = f'model_type is {kind!r}, by which vLLM chooses how to read the config: write "{MODEL_TYPE}"'
        yield Finding("error", "vllm", "model-type", text)
    if folder.architectures not in ([], [ITS_OWN]):
        text = f'architectures is {folder.architectures}: write ["{ITS_OWN}"]'
        yield Finding("error", "vllm", "architectures", text)


def check_matrices(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    names = {name.removeprefix(PREFIX) for name in folder.tensors}
    matrices = {name for name in names if re.fullmatch(r"lm_heads\.\d+\.weight|\d+\.\d+\.weight", name)}
    if not matrices and "lm_head.weight" not in names:
        text = "it has no output matrix, which vLLM wants in the file; save it with Draftless, which adds the target's"
        yield Finding("error", "vllm", "medusa-no-matrix", text)
    elif not matrices and not folder.said.get("original_lm_head"):
        text = "its heads share one matrix, lm_head.weight; write original_lm_head: true"
        yield Finding("error", "vllm", "medusa-shared-matrix", text)
    size, tokens = folder.said.get("truncated_vocab_size"), folder.rows("token_map")
    if tokens is not None and tokens != size:
        text = f"token_map has {tokens} tokens and truncated_vocab_size is {size}: write {tokens}"
        yield Finding("error", "vllm", "medusa-token-map", text)


def check_hydra(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    yield Finding("warning", "both", "hydra-not-served", "no server has Hydra; it drafts in Draftless")


MEDUSA_RULES = (check_servers, check_names, check_medusa, check_matrices)
HYDRA_RULES = (check_hydra,)
