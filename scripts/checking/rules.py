"""The silent killers: faults with which a server drafts without an error and accepts almost no draft token.

Draftless reads a head by its tensors, servers by config.json. Each rule compares what they read with what Draftless
read. What a server refuses aloud needs no rule; `--serve` shows it. The facts are of vLLM 0.32 and 0.33 (Medusa: up to
0.32) and SGLang 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig

from decode import Target
from heads.formats.decoder_layer import NESTED, read_windows
from heads.formats.dflash import find_scales
from heads.formats.eagle import READ, norms_residual
from heads.formats.layout import EMBEDDING, ConfigDict, number, section
from heads.formats.weight_files import CONFIG, read_json, read_weights
from heads.kinds import get_kind
from heads.vocabulary import VocabularyHead
from proposers.draft_models.proposer import has_other_tokens

Engine = Literal["vllm", "sglang", "both", "draftless"]
LAYER_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps")
DIFFERENT = 0.01  # relative norm of the difference; rounding to bfloat16 stays below it


@dataclass(frozen=True)
class Finding:
    """What is wrong with a head. An error means that the engine cannot serve it as it was trained."""

    level: Literal["error", "warning"]
    engine: Engine  # "both": vLLM and SGLang; "draftless": loading and drafting here
    name: str  # stable, so that programs can look for it
    text: str  # what is wrong and what to do, in one line


error, warning = partial(Finding, "error"), partial(Finding, "warning")


@dataclass(frozen=True)
class Folder:
    """A head as it is loaded, and what its files have for servers."""

    head: Any
    config: ConfigDict  # config.json
    tensors: Mapping[str, Tensor]
    target: Target

    @property
    def layer(self) -> ConfigDict:
        """The config with the sizes of the layer, which speculators' format nests."""
        return {**self.config, **section(self.config, NESTED)}


def find_faults(path: Path, head: VocabularyHead, target: Target) -> list[Finding]:
    """The faults of a folder, whose head is loaded. Kinds that no server has a class for have none.

    Raises ValueError if a value in config.json has the wrong type.
    """
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    folder, servers = Folder(head, config, read_weights(path)[0], target), ("both", *get_kind(head.kind).servers)
    found = (finding for rule in RULES.get(head.kind, ()) for finding in rule(folder))
    return [finding for finding in found if finding.engine in servers]


def find_draft_faults(draft: Target, target: Target) -> list[Finding]:
    """The faults of a draft model. Other programs compare sizes of vocabularies at most."""
    if draft.vocabulary == target.vocabulary and not has_other_tokens(draft, target):
        return []
    return [error("both", "tokenizer", "it has another tokenizer than the target: only Draftless drafts with it")]


def check_medusa(folder: Folder) -> Iterator[Finding]:
    head, config = folder.head, folder.config
    if head.config.bias and not config.get("medusa_fc_bias"):
        yield error("vllm", "biases", "vLLM ignores the biases without medusa_fc_bias: true in config.json: add it")
    if head.token_map is not None or head.output == "target":
        text = "vLLM 0.21 to 0.32 needs all rows of an output matrix; write a copy: draftless check HEAD --export DIR"
        yield error("vllm", "medusa-token-map", text)


def check_biases(folder: Folder) -> Iterator[Finding]:
    """Only EAGLE-1 in SGLang has a bias of fc, which stays random if the file has none."""
    head, bias = folder.head, folder.tensors.get("fc.bias")
    if bias is not None and bool(bias.any()):
        engine: Engine = "both" if head.kind == "eagle3" else "vllm"
        yield error(engine, "biases", "fc.bias is not zero but ignored: train the head without it")
    if bias is None and head.kind == "eagle":
        yield error("sglang", "biases", "there is no fc.bias, so SGLang's stays random: add zeros")


def check_sizes(folder: Folder) -> Iterator[Finding]:
    """Servers build the layer from config.json alone, with transformers' defaults for missing keys."""
    head, config, context, default = folder.head, folder.layer, folder.target.context, LlamaConfig()
    layers = getattr(head.config, "layers", 1)
    trained = {"num_hidden_layers": layers, "hidden_size": head.hidden_size, "vocab_size": head.vocab_size}
    trained |= {name: getattr(head.config.layer, name) for name in LAYER_SIZES}
    read = {name: number(config, name) or getattr(default, name) for name in trained}
    read["num_key_value_heads"] = number(config, "num_key_value_heads") or read["num_attention_heads"]
    read["head_dim"] = number(config, "head_dim") or read["hidden_size"] // read["num_attention_heads"]
    if head.kind != "eagle":
        is_whole = head.output == "target" and head.kind != "dflash"
        trained["draft_vocab_size"] = None if is_whole else head.draft_size
        read["draft_vocab_size"] = number(config, "draft_vocab_size") or (
            None if head.kind != "dflash" else read["vocab_size"]
        )
    try:
        window, full_layers = read_windows({**config, **section(config, "dflash_config")})
        read |= {"sliding_window": window, "full_attention layers": full_layers}
        trained |= {"sliding_window": head.window, "full_attention layers": getattr(head.config, "full_layers", ())}
        if window and config.get("model_type") == "qwen3" and not config.get("use_sliding_window"):
            text = "transformers' config of Qwen3 drops the window, as in speculators: write use_sliding_window: true"
            yield warning("both", "sizes", text)
    except ValueError as fault:
        yield error("both", "sizes", f"config.json is not understood: {fault}")
    wrong = [f"{name} {read[name]}, not {value}" for name, value in trained.items() if read[name] != value]
    if wrong:
        text = f"config.json{'' if config else ' is missing, which'} means {'; '.join(wrong)}: write the right numbers"
        yield error("both", "sizes", text)
    positions = number(config, "max_position_embeddings") or default.max_position_embeddings
    if positions < context:
        text = f"after max_position_embeddings ({positions}) drafting ends: write the target's {context}"
        yield warning("both", "sizes", text)


def check_embeddings(folder: Folder) -> Iterator[Finding]:
    """SGLang takes the target's embeddings, and its output matrix for EAGLE-1. vLLM takes the file's embeddings if they
    differ, as loading does here."""
    head, config = folder.head, folder.layer
    if head.kind == "eagle3" and config.get("tie_word_embeddings"):
        text = "with tie_word_embeddings: true, SGLang takes the embeddings for the output matrix: write false"
        yield error("sglang", "embeddings", text)
    if head.kind == "eagle" and head.output == "shared":
        yield error("sglang", "output", "SGLang takes the target's output matrix, not the head's: train without it")
    own = folder.tensors.get(EMBEDDING)
    if own is None and head.kind == "eagle" and folder.target.embedding_scale != 1:
        text = "it was trained on scaled embeddings, and servers look up unscaled ones: train an EAGLE-3 head"
        yield error("both", "embeddings", text)
    if own is None:
        return
    theirs, own = folder.target.embedding_matrix.cpu().float(), own[: head.vocab_size]  # servers' padding aside
    if own.shape != theirs.shape or torch.dist(own.float(), theirs) > DIFFERENT * theirs.norm():
        text = f"SGLang takes the target's embeddings, not {EMBEDDING}: train without it, or remove it if it is random"
        yield error("sglang", "embeddings", text)


def check_layer_ids(folder: Folder) -> Iterator[Finding]:
    """Each engine has a list of its own of the target's layers that an EAGLE-3 head reads, and a default without it.

    vLLM's list is at the top of the config: L is the output of the first L layers. SGLang's is in `eagle_config`, by
    the layer that outputs them, from 0: L - 1. The default is L = 2, n // 2, n - 3 of n layers.
    """
    head, config, layers = folder.head, folder.config, folder.target.config.num_hidden_layers
    nested = section(config, "eagle_config")
    for engine, place, listed, shift in (
        ("vllm", "at the top of config.json", config.get(READ), 0),
        ("sglang", "in eagle_config", nested.get(READ), 1),
    ):
        trained, default = ([layer - shift for layer in each] for each in (head.features, (2, layers // 2, layers - 3)))
        if (listed or default) != trained:
            text = f"it would read layers {listed or default}, not {trained}: write {READ}: {trained} {place}"
            yield error(engine, "layer-ids", text)


def check_offsets(folder: Folder) -> Iterator[Finding]:
    """d2t [D] holds offsets: draft token i is the target's token i + d2t[i]. Loading has compared it with t2d."""
    offsets = folder.tensors.get("d2t")
    if folder.head.token_map is not None and offsets is None:
        yield error("both", "d2t", "there is no d2t, and servers ignore t2d: save the head with Draftless")
    elif offsets is not None and "t2d" not in folder.tensors and len(offsets) > 2 and bool((offsets.diff() > 0).all()):
        text = "d2t must hold offsets, but it seems to hold token ids: subtract 0, 1, 2, ... from its entries"
        yield error("both", "d2t", text)


def check_block(folder: Folder) -> Iterator[Finding]:
    """vLLM needs norms of queries and keys, and the output rows of a part of the vocabulary."""
    head, config = folder.head, folder.config
    if not head.config.layer.qk_norm:
        text = "vLLM's class has norms of queries and keys, which stay at 1: train the head with them"
        yield error("vllm", "norms", text)
    if head.token_map is not None and "lm_head.weight" not in folder.tensors:
        text = "a part of the vocabulary is drafted, and vLLM needs its output rows: save the head with Draftless"
        yield error("vllm", "output", text)
    if not head.has_pairs and head.config.from_anchor:
        text = (
            "without a pair score, vLLM takes no token from the anchor's row: train it with sample_from_anchor: false"
        )
        yield error("vllm", "block", text)
    if not has_markov_head(head):
        if not head.config.causal and config.get("sliding_window_non_causal") is False:
            yield error("vllm", "block", "vLLM takes sliding_window_non_causal: false for causal blocks: remove it")
        if head.config.causal and head.config.full_layers:
            text = "vLLM takes all layers of this format for causal, also those without a window: serve z-lab's folder"
            yield error("vllm", "block", text)
    if "speculators_model_type" in config and (scales := find_scales(head.config)):
        text = f"the format of speculators has no {' and '.join(scales)}, as it was trained: serve z-lab's folder"
        yield error("vllm", "block", text)
    if head.config.candidates and head.config.from_anchor:
        yield error("vllm", "block", "vLLM's DFlash2 takes no token from the anchor's row: it needs another head")
    if "speculators_model_type" not in config:
        yield warning("vllm", "format", "config.json is not speculators': whether vLLM reads it was not tried")
        return
    trained = {
        "aux_hidden_state_layer_ids": [*head.features],
        "mask_token_id": head.config.mask_token,
        "block_size": head.rows,
        "sample_from_anchor": head.config.from_anchor,
    }
    for name, value in trained.items():
        if config.get(name) != value:
            text = f"config.json must have {name}: {json.dumps(value)}, as it was trained"
            yield error("vllm", "block", text)


def has_markov_head(head: Any) -> bool:
    """Whether it is what vLLM and speculators call DSpark."""
    return bool(getattr(head, "has_pairs", False)) and not head.config.candidates


def check_norms(folder: Folder) -> Iterator[Finding]:
    """In servers, `norm_output` means that normed states are fed back, and the output matrix always has a norm."""
    head, config = folder.head, folder.config
    trained = {name: getattr(head.config, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm")}
    trained["norm_output"] = head.config.normed_feedback
    default = {"norm_before_residual": norms_residual(config)}
    for name, value in trained.items():
        if bool(config.get(name, default.get(name))) != value:
            yield error("both", "norms", f"config.json must have {name}: {str(value).lower()}, as it was trained")
    if head.config.norm_before_residual or head.config.layer.qk_norm:
        text = "SGLang ignores norm_before_residual and norms of queries and keys: train without them"
        yield error("sglang", "norms", text)
    if head.kind == "peagle" and head.config.fc_norm:
        yield error("vllm", "norms", "vLLM's P-EAGLE has no fc_norm: train without it")
    if not head.config.final_norm:
        yield error("both", "norms", "it has no norm before its output matrix, and servers have one: train with it")


FUSING = check_biases, check_embeddings, check_sizes, check_layer_ids, check_norms, check_offsets
RULES: dict[str, tuple[Callable[[Folder], Iterator[Finding]], ...]] = {  # by the kinds that a server has
    "medusa": (check_medusa,),
    "eagle": (check_biases, check_embeddings, check_sizes),
    "eagle3": FUSING,
    "peagle": FUSING,
    "dflash": (check_sizes, check_offsets, check_block),
}
