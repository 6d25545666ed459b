"""Rules of vLLM up to 0.32 for a Medusa head. vLLM 0.33 and SGLang do not serve Medusa, and no engine serves Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterator

from decode import Target
from heads.formats.layout import count
from scripts.serving_rules.folder import Finding, HeadFolder, error, warning

PREFIX = "medusa_heads."  # vLLM strips it
MATRIX = r"lm_heads\.\d+\.weight|\d+\.\d+\.weight"
VLLM_NAMES = rf"(blocks\.\d+\.layers\.\d+|\d+\.\d+\.linear)\.(weight|bias)|{MATRIX}|lm_head\.weight|token_map"
HEADS = ("num_heads", "medusa_num_heads")
LAYERS = ("num_hidden_layers", "num_layers", "medusa_num_layers")  # default: 1
TOKEN_MAP_FINDING = "medusa-token-map"
SHOWN = 3


def check_config(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    yield warning("vllm", "medusa-removed", "vLLM serves Medusa heads up to 0.32; 0.33 removed the method")
    yield warning("sglang", "medusa-not-served", "SGLang does not serve Medusa heads; use vLLM or Draftless")
    if (kind := folder.config.get("model_type")) != "medusa":
        yield error("vllm", "model-type", f'model_type is {kind!r}, so vLLM misreads the config: write "medusa"')
    if folder.architectures not in ([], ["MedusaModel"]):
        yield error("vllm", "architectures", f'architectures is {folder.architectures}: write ["MedusaModel"]')
    heads = next((folder.config[key] for key in HEADS if key in folder.config), None)
    layers = next((folder.config[key] for key in LAYERS if key in folder.config), 1)
    held, blocks = count_blocks(folder)
    if held != heads:
        yield error("vllm", "medusa-head-count", f"num_heads is {heads}, but the file has {held} heads: write {held}")
    if blocks != layers:
        yield error("vllm", "medusa-layer-count", f"num_hidden_layers is {layers}: write {blocks}, as in the file")
    sizes = folder.read_size("hidden_size"), folder.read_size("vocab_size")
    if sizes != (theirs := (target.config.hidden_size, target.vocabulary)):
        text = f"hidden_size and vocab_size are {sizes} (or default to them), the target's are {theirs}: write these"
        yield error("vllm", "medusa-sizes", text)


def check_tensors(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    names = [name.removeprefix(PREFIX) for name in folder.tensors]
    if unknown := [name for name in names if not re.fullmatch(VLLM_NAMES, name)]:
        text = f"vLLM ignores these tensors: {', '.join(unknown[:SHOWN])}; save the head with Draftless"
        yield error("vllm", "medusa-unknown-keys", text)
    if any(name.endswith(".bias") for name in names) and not folder.config.get("medusa_fc_bias"):
        yield error("vllm", "medusa-bias-dropped", "vLLM ignores the biases without medusa_fc_bias: true; add it")
    matrices = any(re.fullmatch(MATRIX, name) for name in names)
    if not matrices and "lm_head.weight" not in names:
        text = "there is no output matrix, and vLLM needs one; save the head with Draftless, which adds the target's"
        yield error("vllm", "medusa-no-matrix", text)
    elif not matrices and not folder.config.get("original_lm_head"):
        yield error("vllm", "medusa-shared-matrix", "all heads share lm_head.weight; write original_lm_head: true")


def check_token_map(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    """vLLM's check for uninitialised weights ran before they were loaded up to 0.20, and runs after it from 0.21."""
    tokens, stated = folder.rows("token_map"), folder.config.get("truncated_vocab_size")
    if tokens is None:
        return
    if tokens != stated:
        yield error("vllm", "medusa-token-map-size", f"truncated_vocab_size is {stated}: write {tokens}")
    text = (
        'vLLM 0.21 to 0.32 refuses a token_map (draft vocabulary). Tried with 0.32.0: "Following weights were not '
        "initialized from checkpoint: {'token_map'}\". By its source, vLLM up to 0.20 loads it. For later versions "
        "write a copy without it: check.py HEAD --export DIR"
    )
    yield error("vllm", TOKEN_MAP_FINDING, text)


def count_blocks(folder: HeadFolder) -> tuple[int, int]:
    """The number of heads in the file, and of blocks in each."""
    names = [name.removeprefix(PREFIX) for name in folder.tensors]
    forms = ("blocks.{}.layers.{}.weight", "{}.{}.linear.weight")
    found = [numbers for form in forms if (numbers := count(form, names))]
    return (found[0][0], found[0][1]) if found else (0, 0)


def check_hydra(folder: HeadFolder, target: Target) -> Iterator[Finding]:
    yield warning("both", "hydra-not-served", "no engine serves Hydra heads; use Draftless")


MEDUSA_RULES = (check_config, check_tensors, check_token_map)
HYDRA_RULES = (check_hydra,)
