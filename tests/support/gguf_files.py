"""GGUF files of tiny models and vocabularies, written with gguf-py, and random blocks of every form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Form
from torch import Tensor, nn

from decode.weights.blocks import FLOAT_BLOCKS
from decode.weights.gguf.file import GgufFile
from tests.support.models import VOCABULARY, tiny

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 256}
FORMS = (Form.Q8_0, Form.Q4_1)
TIED = {name: {"tie_word_embeddings": True} for name in ("gemma2", "gemma3_text")}  # ggml knows no others
RENAMED = {
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
}  # where ggml has another name for an architecture than transformers
ONE_MORE = ("gemma2", "gemma3", "nemotron")  # the norms' weights in their files


def random_blocks(form: int, outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight of random bits as a file stores it, [N, bytes], and its values by gguf-py, [N, K]."""
    draw = np.random.default_rng(seed)
    if form in FLOAT_BLOCKS.values():
        return _random_float_blocks(form, outputs, inputs, draw)
    kind = Form(form)
    size, length = gguf.GGML_QUANT_SIZES[kind]
    if size == 1:
        numbers = torch.from_numpy(draw.standard_normal((outputs, inputs), dtype=np.float32))
        dtype = {Form.F32: torch.float32, Form.F16: torch.float16, Form.BF16: torch.bfloat16}[kind]
        return numbers.to(dtype).view(torch.uint8), numbers.to(dtype).float()
    blocks = draw.integers(0, 256, (outputs, inputs // size, length), dtype=np.uint8)
    begin = length - 2 if kind == Form.Q6_K else 0
    count = 2 if kind in (Form.Q4_1, Form.Q5_1, Form.Q4_K, Form.Q5_K) else 1  # a scale, and a minimum
    scales = draw.uniform(-0.1, 0.1, (outputs, inputs // size, count)).astype(np.float16)
    scales[0, 0, 0] = 1e-6  # subnormal
    blocks[:, :, begin : begin + 2 * count] = scales.view(np.uint8)
    data = blocks.reshape(outputs, -1)
    return torch.from_numpy(data), torch.from_numpy(np.ascontiguousarray(gguf.dequantize(data, kind)))


def _random_float_blocks(form: int, outputs: int, inputs: int, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """The forms that ggml lacks. Their scales are float16 numbers, so that no product rounds."""
    bits, has_minimum = next(key for key, number in FLOAT_BLOCKS.items() if number == form)
    scales = draw.uniform(-0.1, 0.1, (outputs, inputs // 32, 1 + has_minimum)).astype(np.float16).astype(np.float32)
    numbers = draw.integers(0, 256, (outputs, inputs // 32, 4 * bits), dtype=np.uint8)
    quants = np.concatenate([numbers & 15, numbers >> 4], axis=-1) - 8.0 if bits == 4 else numbers.view(np.int8)
    values = scales[..., :1] * quants.astype(np.float32) + (scales[..., 1:] if has_minimum else 0)
    data = np.concatenate([scales.view(np.uint8), numbers], axis=-1)
    return torch.from_numpy(data.reshape(outputs, -1)), torch.from_numpy(values.reshape(outputs, inputs))


def write_model(
    name: str, path: Path, forms: tuple[Form, ...] = FORMS, extra: Any = None, fields: Any = None, **overrides: Any
) -> nn.Module:
    """Write a tiny model's file; its matrices take the forms in turns. Returns the model as it was.

    extra: more tensors by name. fields: more of the header by key, as for `write_vocabulary`.
    """
    model = tiny(name, dtype=torch.float32, **{**SIZES, **TIED.get(name, {}), **overrides})
    config, architecture = model.config, RENAMED.get(model.config.model_type, model.config.model_type)
    number = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    writer = gguf.GGUFWriter(path, architecture)
    _describe(writer, config)
    _add_fields(writer, fields)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    matrices = 0
    for key, parameter in _split_experts(model):
        tensor, stored = parameter.detach(), names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert stored is not None, key
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(stored.split(".")[-2])
        if architecture == "llama" and heads:
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if architecture in ONE_MORE and stored.endswith("norm.weight"):
            tensor = tensor + 1
        if tensor.dim() == 1 or "ffn_gate_inp" in stored:
            writer.add_tensor(stored, tensor.numpy())
            continue
        form = forms[matrices % len(forms)]
        matrices += 1
        writer.add_tensor(stored, gguf.quantize(tensor.numpy(), form), raw_dtype=form)
    for key, tensor in (extra or {}).items():
        writer.add_tensor(key, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _split_experts(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, but the gates and the other halves of experts apart."""
    for key, parameter in model.named_parameters():
        path, _, kind = key.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if parts is None:
            yield key, parameter
            continue
        for part, tensor in zip(parts, parameter.chunk(len(parts), dim=1), strict=True):
            yield f"{path}.{part}.weight", tensor.contiguous()


def _describe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head := getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(int(head * config.rope_parameters.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(config.rope_parameters.get("rope_theta", 10000.0))
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", 1e-6))
    writer.add_layer_norm_eps(getattr(config, "norm_epsilon", getattr(config, "layer_norm_eps", 1e-6)))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = ["<unk>", "<s>", "</s>", "!#", *(chr(code) for code in range(33, 29 + VOCABULARY - 4))][:VOCABULARY]
    tokens += [f"<{number}>" for number in range(VOCABULARY - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if len(token) > 2 else 1 for token in tokens])
    writer.add_token_merges(["! #"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def write_vocabulary(path: Path, kind: str, texts: Sequence[str], types: Sequence[int], fields: Any = None) -> GgufFile:
    """Write a file with a vocabulary only, and open it.

    kind: of the tokenizer. fields: more of the header by key; those without a dot are `tokenizer.ggml`'s.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list([*texts])
    writer.add_token_types([*types])
    _add_fields(writer, fields)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile.open(path)


def _add_fields(writer: gguf.GGUFWriter, fields: Any) -> None:
    for key, value in (fields or {}).items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
