"""What a GGUF file's header describes: a config and a tokenizer, kept in the user's cache.

transformers makes the config. Reading it takes seconds, so it is done once.
"""

from __future__ import annotations

import contextlib
import io
from importlib.machinery import PathFinder
from pathlib import Path

import transformers
from filelock import FileLock
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from decode.devices.user_cache import PARTIAL, digest, print_notice, scratch, user_cache
from decode.weights.gguf.file import GgufFile
from decode.weights.gguf.tokenizer import Vocabulary, make_tokenizer

GGUF_ADVICE = 'reading a GGUF file needs the gguf package: run pip install "draftless[gguf]"'
DESCRIPTION = "config.json", "tokenizer.json"
LARGEST_GEMMAS = {("gemma2", 46), ("gemma3", 62)}  # of 27B, by their layers
BASE_IGNORED = {"starcoder2", "stablelm"}  # architectures whose base of rotary positions transformers does not read
PARTIAL_ROTARY = {"stablelm", "nemotron", "phi3"}  # architectures that may rotate a part of a head's elements
IGNORED = {  # other keys of a header that transformers does not read, and what a config calls them
    "gemma2.attn_logit_softcapping": "attn_logit_softcapping",
    "gemma2.final_logit_softcapping": "final_logit_softcapping",
    "olmoe.attention.clamp_kqv": "clip_qkv",  # 0: none
}
FORM = 5  # of what is written; a folder in the cache with another is made again


def is_installed(package: str) -> bool:
    """Whether a package could be imported.

    `importlib.util.find_spec("pip")` would also ask setuptools, which then refuses to be imported: torch's compilers
    would fail later in this process.
    """
    return PathFinder.find_spec(package) is not None


def require_gguf() -> None:
    """Raise ValueError with advice if the package gguf is missing."""
    if not is_installed("gguf"):
        raise ValueError(GGUF_ADVICE)


def has_description(folder: Path) -> bool:
    """Whether a folder has a config and a tokenizer, which are read instead of those of a GGUF file in it."""
    return all((folder / name).is_file() for name in DESCRIPTION)


def describe(file: GgufFile) -> Path:
    """A folder with the config and the tokenizer of a file: its own folder, if they are there, or one in the cache.

    Raises ValueError if transformers does not know the architecture, if the tokenizer is of an unknown kind, and
    without the package gguf.
    """
    if has_description(file.path.parent):
        return file.path.parent
    state = file.path.stat()
    known = str(file.path.resolve()), state.st_size, state.st_mtime_ns, transformers.__version__, FORM
    folder = user_cache() / "gguf" / digest(known)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            print_notice(f"reading the header of {file.path.name}, once")
            with scratch(folder.with_suffix(PARTIAL)) as temporary:
                write_description(file, temporary)
                temporary.rename(folder)
    return folder


def write_description(file: GgufFile, folder: Path) -> None:
    """Write a file's config, generation config and tokenizer, chat template included. Errors: those of `describe`."""
    require_gguf()
    vocabulary = Vocabulary(file)
    tokenizer = make_tokenizer(file, vocabulary)  # first: transformers' errors do not name a vocabulary's faults
    config = _make_config(file)
    generation = make_generation_config(vocabulary)
    for role in ("bos", "eos", "pad"):  # else a config has its class's default, which the file may lack
        setattr(config, f"{role}_token_id", vocabulary.roles.get("padding" if role == "pad" else role))
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_config(file: GgufFile) -> PreTrainedConfig:
    """That of transformers, which leaves out the size of experts, and reads no OLMoE files."""
    renamed, values = GGUF_CONFIG_MAPPING["qwen3_moe"], file.fields
    if file.architecture == "olmoe":
        found = {name: values[f"olmoe.{key}"] for key, name in renamed.items() if name and f"olmoe.{key}" in values}
        config = AutoConfig.for_model("olmoe", tie_word_embeddings="output.weight" not in file.tensors, **found)
        _complete(file, config)
        return config
    with contextlib.redirect_stderr(io.StringIO()):
        config = AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name)
    if size := values.get(f"{file.architecture}.expert_feed_forward_length"):
        config.moe_intermediate_size = size
    config._name_or_path = ""
    _complete(file, config)
    return config


def _complete(file: GgufFile, config: PreTrainedConfig) -> None:
    """Take over what transformers ignores in a header, and Gemma's scale of queries, which no header has: llama.cpp
    knows it by the number of layers.

    Raises ValueError for rotary embeddings of another kind, and for factors that no config has.
    """
    architecture, values = file.architecture, file.fields
    layers = getattr(config, "num_hidden_layers", None)
    if (architecture, layers) in LARGEST_GEMMAS:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    for key, name in IGNORED.items():
        if value := values.get(key):
            setattr(config, name, value)
    for key in ("rope.scaling.attn_factor", "expert_weights_scale"):
        if values.get(f"{architecture}.{key}", 1) not in (0, 1):  # 0: none
            has = f"{file.path.name} has {key} {values[f'{architecture}.{key}']}"
            raise ValueError(f"{has}, which is not read; put the model's config.json next to it")
    _scale_positions(file, config)


def _scale_positions(file: GgufFile, config: PreTrainedConfig) -> None:
    """Take over the base, the share and the scaling of rotary embeddings. Raises ValueError for another scaling."""
    architecture, values = file.architecture, file.fields
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma scales layers without a window
    if architecture in PARTIAL_ROTARY and (rotated := values.get(f"{architecture}.rope.dimension_count")):
        rope["partial_rotary_factor"] = rotated / (config.hidden_size // config.num_attention_heads)
    if architecture in BASE_IGNORED and (base := values.get(f"{architecture}.rope.freq_base")):
        rope["rope_theta"] = base
    factor = values.get(f"{architecture}.rope.scaling.factor") or values.get(f"{architecture}.rope.scale_linear") or 1.0
    kind = values.get(f"{architecture}.rope.scaling.type", "linear")
    if kind == "none" or factor == 1.0 or rope.get("rope_type", "default") != "default":
        return
    if kind not in ("linear", "yarn"):
        has = f"{file.path.name} scales rotary embeddings by {kind!r}"
        raise ValueError(f"{has}, and linear and yarn are read; put the model's config.json next to it")
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        length = values.get(f"{architecture}.rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = length or int(config.max_position_embeddings / factor)


def make_generation_config(vocabulary: Vocabulary) -> GenerationConfig:
    """The tokens that begin, end and pad an answer."""
    roles, ends = vocabulary.roles, vocabulary.ends
    one = ends[0] if ends else None
    return GenerationConfig(
        bos_token_id=roles.get("bos"),
        eos_token_id=ends if len(ends) > 1 else one,
        pad_token_id=roles.get("padding"),
    )
