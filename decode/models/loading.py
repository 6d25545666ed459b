"""Loading models by name."""

from __future__ import annotations

import textwrap
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from decode.devices.backend import Backend, find_backend
from decode.models.adapters import ADAPTER, ADAPTER_WEIGHTS, apply_adapter, find_base, is_adapter, require_peft
from decode.models.default_model import default_model
from decode.requests.text import Tokenizer
from decode.weights.gguf.description import has_description
from decode.weights.gguf.model import find_gguf, load_gguf
from decode.weights.layers import cast, refuse_gaps

POINTER = b"version https://git-lfs.github.com/spec"  # begins the text that Git LFS puts in place of a file
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
FILES = (  # that are read, if they are there; damaged ones of some kinds would be ignored
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json", ADAPTER, ADAPTER_WEIGHTS),
)
FIXED16 = "fixed16"  # float32, but for the inputs of weights in blocks; see `Target.load`
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES |= {FIXED16: torch.float32}


def load_model(
    name: str | PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    device_map: str | None = None,
    in_blocks: bool = False,
) -> tuple[PreTrainedModel, Tokenizer]:
    """A model and its tokenizer from a local folder, a hub id or a GGUF file; without a name, the default model.

    name: of a GGUF file on the hub, "OWNER/REPOSITORY/FILE.gguf". A local folder may have a peft adapter instead of a
    model: it is merged into the weights of the base model that its config names.

    dtype: a torch dtype or its name; by default float32 on a CPU, else the checkpoint's. device: for example "cuda:0";
    by default a GPU if there is one. device_map: accelerate's, for example "auto", instead of a device. in_blocks: in
    float32 on a CPU, a GGUF file's weights stay in its blocks. Such a model runs once it is a target, see
    `Target(..., in_place=True)`.

    Raises ValueError for an unknown dtype or device, if there is no such model, if it is damaged, incomplete or of an
    unknown form, and for an adapter without the package peft.
    """
    backend = _find_backend(device)
    default_dtype = backend.default_dtype if device_map is None else "auto"
    if dtype == FIXED16 and not in_blocks:
        raise ValueError(f"dtype {FIXED16} is for weights in blocks, which only accelerated targets have; use float32")
    chosen_dtype = default_dtype if dtype is None else _parse_dtype(str(dtype).removeprefix("torch."))
    place = str(default_model() if name is None else name)
    try:
        may_stay = in_blocks and device_map is None and chosen_dtype == torch.float32 and backend.takes_blocks
        model, tokenizer = _load_place(place, chosen_dtype, device_map, may_stay)
    except Exception as error:  # each file format has errors of its own
        raise ValueError(f"cannot load a model from {place!r}: {_explain(error, place)}") from error
    if device_map is None and model.device != backend.device and backend.waits:
        model = model.to(backend.device)
    return model, tokenizer


def check_model(name: str | PathLike[str]) -> None:
    """Raise ValueError, as `load_model` does, if there is no such model; its weights are not read.

    Of a model on the hub, the config is fetched; of a GGUF file there, the whole file.
    """
    place = str(name)
    try:
        path = None if is_adapter(place) else find_gguf(place)
        _refuse_files(path or Path(place))
        if is_adapter(place):
            require_peft()
            if (base := find_base(Path(place))) is not None:
                check_model(base)
        elif path is None:
            AutoConfig.from_pretrained(place, trust_remote_code=False)
        elif not path.is_file():
            raise ValueError("there is no such file")
    except Exception as error:  # each file format has errors of its own
        raise ValueError(f"cannot load a model from {place!r}: {_explain(error, place)}") from error


def _load_place(place: str, dtype: Any, device_map: Any, in_blocks: bool) -> tuple[PreTrainedModel, Any]:
    """The model and the tokenizer of a folder, a hub id, a GGUF file or an adapter. dtype: of torch, or "auto"."""
    if is_adapter(place):
        return _load_adapted(Path(place), dtype, device_map)
    path = find_gguf(place)
    _refuse_files(path or Path(place))
    if path is not None:
        return load_gguf(path, dtype, in_blocks=in_blocks, device_map=device_map)
    model = _load(place, dtype=dtype, device_map=device_map)
    return model, AutoTokenizer.from_pretrained(place, trust_remote_code=False)


def _load_adapted(folder: Path, dtype: Any, device_map: Any) -> tuple[PreTrainedModel, Any]:
    """The base model of an adapter with the adapter merged, and the tokenizer of the adapter's folder or the base."""
    require_peft()
    _refuse_files(folder)
    base = find_base(folder)
    place = str(default_model() if base is None else base)
    try:
        # These hold more than half precision does. Rounded after merging, they give the fingerprint of float32.
        is_exact = is_adapter(place) or find_gguf(place) is not None
        model, tokenizer = _load_place(place, torch.float32 if is_exact else dtype, device_map, in_blocks=False)
    except Exception as error:  # each file format has errors of its own
        raise ValueError(f"its base model {place!r} cannot be loaded: {_explain(error, place)}") from error
    model = apply_adapter(model, folder)
    if is_exact and dtype != "auto":
        model = cast(model, dtype)
    model.name_or_path = model.config.name_or_path = str(folder)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    return model, type(tokenizer).from_pretrained(folder) if has_tokenizer else tokenizer


def _load(name: str, **options: Any) -> PreTrainedModel:
    """A model from a folder or hub id. Raises ValueError for missing or misshapen weights.

    Some models that also see images have no class for text alone. They are loaded whole, and read text as any other.
    """
    try:
        kind = type(AutoConfig.from_pretrained(name, trust_remote_code=False))
    except (OSError, ValueError):  # of an adapter on the hub, whose base is named in it
        kind = PretrainedConfig
    sees = kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model, report = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
        name,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # refused below, with their names
        output_loading_info=True,
        **options,
    )
    refuse_gaps(report)
    return model


def _refuse_files(path: Path) -> None:
    """Raise ValueError for files without their content: empty, or Git LFS pointers."""
    weights = next((found for pattern in WEIGHTS if (found := sorted(path.glob(pattern)))), [])
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError("it is a file; name the folder with config.json, tokenizer and weights, or a GGUF file")
    folder = path.parent if path.is_file() and has_description(path.parent) else path
    for file in (path, *weights, *map(folder.joinpath, FILES)):
        if not file.is_file():
            continue
        with file.open("rb") as stream:
            begin = stream.read(len(POINTER))
        if begin == POINTER:
            raise ValueError(f"{file.name} is a Git LFS pointer, not the file itself; run git lfs pull in its folder")
        if not begin:
            raise ValueError(f"{file.name} is empty; fetch it again")


def _explain(error: Exception, folder: str) -> str:
    """An error of transformers in one line."""
    reason = textwrap.shorten(str(error), 300, placeholder=" ...")
    if not isinstance(error, OSError | ValueError | RuntimeError):  # the text of a KeyError is just a key
        reason = f"{type(error).__name__}: {reason}"
    return reason if Path(folder).exists() else f"there is no such folder or file; as a hub id: {reason}"


def _parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _find_backend(name: str | None) -> Backend:
    if name is None:
        return find_backend(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        backend = find_backend(torch.device(name))
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; examples are cpu, cuda and cuda:1") from None
    if type(backend) is Backend:
        raise ValueError(f"device {name!r} is not supported; use cpu or cuda")
    count = torch.get_device_module(backend.device).device_count()
    if (backend.device.index or 0) >= count:
        raise ValueError(f"device {name!r} is not there; torch sees {count} of its type")
    return backend
