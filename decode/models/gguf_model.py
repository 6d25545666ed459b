"""Models from GGUF files: on a CPU their layers keep the weights as they are stored, in blocks of a few bits.

transformers knows the architectures: it makes the config and the tokenizer from the file's header. That takes seconds,
so both are kept in the user's cache. Where blocks cannot be kept, it unpacks the weights, too.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from filelock import FileLock
from huggingface_hub import hf_hub_download
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from decode.cpu.build_cache import digest
from decode.cpu.native_ops import BLOCKS, load_native_ops
from decode.cpu.packed_linear import StoredEmbedding, StoredLinear
from decode.models.gguf_file import GgufFile
from decode.models.user_cache import print_notice, scratch, user_cache

SHIFTED = {"gemma2", "gemma3", "nemotron"}  # their files hold 1 + the norms' weights
# Architectures whose linear layers are stored as transformers has them, rows of the first aside.
IN_BLOCKS = {"llama", "qwen2", "qwen3", "phi3", "starcoder2", "stablelm", *SHIFTED}
ROTATED = {"llama"}  # rows of a head's queries and keys are stored in pairs
# llama.cpp's names of ways to split text before byte-level BPE: each digit is a token, which transformers loses.
SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
ROLES = {"unk_token": "unknown", "bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
FREQUENCIES = "rope_freqs.weight"
GGUF_ADVICE = 'reading a GGUF file needs the gguf package: run pip install "draftless[gguf]"'
DESCRIPTION = "config.json", "tokenizer.json"


def is_installed(package: str) -> bool:
    """Whether a package could be imported.

    `importlib.util.find_spec("pip")` would also ask setuptools, which then refuses to be imported: torch's compilers
    would fail later in this process.
    """
    return PathFinder.find_spec(package) is not None


def find_gguf(name: str) -> Path | None:
    """The GGUF file that a name means: a file, the only one in a folder without other weights, or one on the hub.

    Raises ValueError for a folder with several.
    """
    path = Path(name)
    if path.suffix == ".gguf":
        if path.is_file() or len(path.parts) < 3 or path.is_absolute():
            return path
        return Path(hf_hub_download("/".join(path.parts[:2]), "/".join(path.parts[2:])))
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not files or any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
        return None
    if len(files) > 1:
        raise ValueError(f"it has several GGUF files; name one of {', '.join(file.name for file in files[:9])}")
    return files[0]


def load_gguf(
    path: Path, dtype: torch.dtype | str, *, in_blocks: bool, device_map: Any = None
) -> tuple[PreTrainedModel, str]:
    """The model of a GGUF file, and a folder that its tokenizer can be loaded from.

    dtype: "auto" is float32. in_blocks: keep the weights in blocks, to be packed by `decode.cpu.acceleration`, where
    that is possible. Else they are unpacked.

    Raises ValueError for a file that cannot be read, or that transformers cannot read.
    """
    file = GgufFile.open(path)
    folder = describe(file)
    model = None if device_map is not None else load_in_blocks(file, folder)
    if model is None:
        model = _load_with_transformers(file, folder, dtype, device_map)
    elif not in_blocks or load_native_ops() is not None:
        unpack_layers(model)
        model = model.to(torch.float32 if dtype == "auto" else dtype)
    _scale_frequencies(file, model)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, str(folder)


def _load_with_transformers(file: GgufFile, folder: Path, dtype: Any, device_map: Any) -> PreTrainedModel:
    with contextlib.redirect_stderr(io.StringIO()):  # hides short progress bars
        model = AutoModelForCausalLM.from_pretrained(
            file.path.parent,
            config=AutoConfig.from_pretrained(folder),
            gguf_file=file.path.name,
            quantization_config=GgufConfig(dequantize=True),  # else a machine with GGUF kernels keeps the blocks
            dtype=dtype,
            device_map=device_map,
        )
    for key in ("quantization_config", "_model_name_or_path"):
        vars(model.config).pop(key, None)  # wrong for a saved model; transformers would refuse the first
    return model


def unpack_layers(model: PreTrainedModel) -> None:
    """Give stored layers their values back, in place."""
    from gguf import GGMLQuantizationType, dequantize

    for path, layer in list(model.named_modules()):
        if isinstance(layer, StoredLinear):
            stored = layer.stored
            values = torch.from_numpy(dequantize(stored.data.numpy(), GGMLQuantizationType(stored.form))).float()
            values = values.view(-1, stored.inputs)
            weight = nn.Parameter(values.clone() if stored.order is None else values[stored.order])
            layer.module.weight = weight
            model.set_submodule(path, layer.module)
    model.tie_weights()
    model.eval()


def describe(file: GgufFile) -> Path:
    """A folder with the config and the tokenizer of a file: its own folder, if they are there, or one in the cache.

    Raises ValueError if transformers does not know the architecture, and without the package gguf.
    """
    if all((file.path.parent / name).is_file() for name in DESCRIPTION):
        return file.path.parent
    state = file.path.stat()
    known = str(file.path.resolve()), state.st_size, state.st_mtime_ns, transformers.__version__
    folder = user_cache() / "gguf" / digest(known)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            print_notice(f"reading the header of {file.path.name}, once")
            with scratch(folder.with_suffix(".partial")) as temporary:
                write_description(file, temporary)
                temporary.rename(folder)
    return folder


def write_description(file: GgufFile, folder: Path) -> None:
    """Write a file's config, generation config and tokenizer, chat template included. Errors: those of `describe`."""
    if not is_installed("gguf"):
        raise ValueError(GGUF_ADVICE)
    place = {"pretrained_model_name_or_path": str(file.path.parent), "gguf_file": file.path.name}
    with _reading_once(), contextlib.redirect_stderr(io.StringIO()):
        config = AutoConfig.from_pretrained(**place)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    config._name_or_path = ""
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    _complete(tokenizer, file).save_pretrained(folder)


@contextlib.contextmanager
def _reading_once() -> Iterator[None]:
    """Let transformers parse a file once: it asks gguf-py for the config and for the tokenizer."""
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _complete(tokenizer: Any, file: GgufFile) -> PreTrainedTokenizerFast:
    """A tokenizer with what transformers loses of the file: digits that stay apart, special tokens, the template."""
    fields, backend = file.fields, tokenizer.backend_tokenizer
    if fields.get("tokenizer.ggml.pre") in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokens, special = fields["tokenizer.ggml.tokens"], {}
    for role, key in ROLES.items():
        number = fields.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and number < len(tokens):
            special[role] = tokens[number]
    length = fields.get(f"{file.architecture}.context_length")
    completed = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=length, **special)
    completed.chat_template = fields.get("tokenizer.chat_template")
    return completed


def load_in_blocks(file: GgufFile, folder: Path) -> PreTrainedModel | None:
    """The model of a file in float32, whose linear layers and embeddings are still to be packed; None if it has others.

    folder: that of `describe`. Raises ValueError if the file lacks a weight of the model, or has others.
    """
    if file.architecture not in IN_BLOCKS:
        return None
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    names = _find_names(file, model)
    stored_in: dict[str, str] = {}  # the paths of layers whose weights stay in blocks
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        path, _, kind = name.rpartition(".")
        module, stored = model.get_submodule(path), file.tensors[names[name]]
        if parameter.shape != stored.shape:
            raise ValueError(
                f"{names[name]} in {file.path.name} is {stored.shape}; the config asks for {(*parameter.shape,)}"
            )
        if kind == "weight" and (type(module) is nn.Linear or isinstance(module, nn.Embedding)):
            stored_in[path] = names[name]
        elif stored.form in BLOCKS.values():
            return None  # a fused or stacked weight
        else:
            setattr(module, kind, nn.Parameter(_make_plain(file, names[name], config)))
    for path, name in stored_in.items():
        module, weight = model.get_submodule(path), file.weight(name, _find_order(file, name, config))
        model.set_submodule(path, (StoredLinear if type(module) is nn.Linear else StoredEmbedding)(weight, module))
    output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if config.tie_word_embeddings:
        output.weight, output.stored = embeddings.weight, embeddings.stored
    return model.eval()


def _find_names(file: GgufFile, model: PreTrainedModel) -> dict[str, str]:
    """The name in the file of each parameter of the model. Raises ValueError for one without, and for others there."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    known = get_tensor_name_map(number, model.config.num_hidden_layers)
    suffixes = ".weight", ".bias"
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names = {name: known.get_name(name, try_suffixes=suffixes) or name for name in parameters}
    if model.config.tie_word_embeddings:
        names["lm_head.weight"] = names["model.embed_tokens.weight"]
    missing, others = {*names.values()} - {*file.tensors}, {*file.tensors} - {*names.values(), FREQUENCIES}
    for found, fault in ((missing, "lacks weights of the model"), (others, "has weights that the model does not use")):
        if found:
            raise ValueError(f"{file.path.name} {fault}: {', '.join(sorted(found)[:3])}")
    return names


def _find_order(file: GgufFile, name: str, config: Any) -> Tensor | None:
    """Which row in the file is row i of the model's tensor; None if all are in order."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or file.architecture not in ROTATED:
        return None
    return torch.arange(file.tensors[name].shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()


def _make_plain(file: GgufFile, name: str, config: Any) -> Tensor:
    """A tensor as the model has it."""
    tensor, order = file.plain(name), _find_order(file, name, config)
    if file.architecture in SHIFTED and name.endswith("norm.weight"):
        tensor = tensor - 1
    return tensor if order is None else tensor[order]


def _scale_frequencies(file: GgufFile, model: PreTrainedModel) -> None:
    """Apply the factors of rotary embeddings that files of Llama 3.1 and later have."""
    if FREQUENCIES in file.tensors:
        factors = file.plain(FREQUENCIES)
        for module in model.modules():
            if (frequencies := getattr(module, "inv_freq", None)) is not None:
                frequencies.div_(factors)
