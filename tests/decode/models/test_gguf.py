"""GGUF files: their header, their models in blocks against transformers' own unpacking, and what is refused."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Form
from torch import nn
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from decode import Target, generate
from decode.cpu import backend, packed_linear
from decode.cpu.packed_linear import PackedEmbedding, PackedLinear
from decode.models.fingerprint import fingerprint_weights
from decode.models.loading import load_model
from decode.weights.gguf import description
from decode.weights.gguf import model as gguf_model
from decode.weights.gguf.description import write_description
from decode.weights.gguf.file import GgufFile
from proposers import NGramProposer
from tests.support.gguf_files import write_model
from tests.support.models import needs_compiler, tiny

PROMPTS = [[1, *range(5, 40)], [7, 8, 9, 7, 8], [60]]
FORMS = (Form.Q8_0, Form.Q4_1, Form.Q5_0, Form.F16, Form.Q5_1, Form.BF16, Form.Q4_0, Form.F32)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 128},  # transformers reads no other size from a file
    "phi3": {},
    "starcoder2": {},
    "stablelm": {},
    "gemma2": {},
    "gemma3_text": {},
    "nemotron": {},
    "qwen3_moe": {"moe_intermediate_size": 768, "norm_topk_prob": True},  # nor other experts
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(description, "user_cache", lambda: folder)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_model("llama", tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def load_stock(path: Path) -> PreTrainedModel:
    """The model as transformers unpacks it."""
    options = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)


@needs_compiler
def test_inputs_in_16_bits(file: Path) -> None:
    """Logits differ from float32's by rounding. The text is the same with and without drafts."""
    exact = Target.load(file, accelerate="packed")
    layer = exact.model.get_output_embeddings()
    if not layer.digits:  # no bytes can be multiplied here
        with pytest.raises(ValueError, match=r"needs weights in blocks.*CPU that multiplies bytes"):
            Target.load(file, dtype="fixed16", accelerate="packed")
        return
    rounded = Target.load(file, dtype="fixed16", accelerate="packed")
    with torch.inference_mode():
        ids = torch.tensor(PROMPTS[:1])
        expected, found = exact.model(ids).logits, rounded.model(ids).logits
    assert 1e-6 < float((found - expected).abs().max() / expected.std()) < 1e-2
    texts = [
        [answer.tokens for answer in generate(rounded, PROMPTS, proposer, batch_size=size, max_new_tokens=24)]
        for proposer, size in ((None, 1), (NGramProposer(), 1), (NGramProposer(), 3))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_16_bits_are_for_blocks(file: Path) -> None:
    for load in (partial(Target.load, file, accelerate="off"), partial(load_model, file)):
        with pytest.raises(ValueError, match="fixed16 is for weights in blocks, which only accelerated targets have"):
            load(dtype="fixed16")
    with pytest.raises(ValueError, match="fixed16 needs weights in blocks"):
        backend.CpuBackend(torch.device("cpu")).round_inputs(nn.Linear(2, 2))


@needs_compiler
def test_fixed_costs_are_those_of_the_weights(tmp_path: Path) -> None:
    """A further node costs more with weights of few bits."""
    write_model("llama", file := tmp_path / "m.gguf", forms=(Form.Q4_0,))
    for accelerate, costs in (("packed", backend.BLOCK_COSTS), ("off", backend.FLOAT_COSTS)):
        target = Target.load(file, accelerate=accelerate, deterministic=True)
        assert target.cost_curve().ratios == pytest.approx(costs)


@needs_compiler
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_text_is_that_of_the_unpacked_model(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(name.split()[0], path, FORMS, **ARCHITECTURES[name])
    stock = load_stock(path)
    target = Target.load(path, accelerate="packed")
    ids = torch.tensor(PROMPTS[:1])
    with torch.inference_mode():
        expected, found = stock(ids).logits, target.model(ids).logits
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.std())
    assert isinstance(target.model.get_input_embeddings(), PackedEmbedding)
    assert torch.equal(target.output_matrix, stock.get_output_embeddings().weight)
    assert target.weights_fingerprint == fingerprint_weights(stock)
    own, _ = load_model(path)
    for found, expected in zip(own.parameters(), stock.parameters(), strict=True):
        assert torch.equal(found, expected)
    texts = [stock.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False) for prompt in PROMPTS]
    for proposer in (None, "merged"):
        answers = generate(target, PROMPTS, proposer, max_new_tokens=16, batch_size=2)
        for prompt, answer, text in zip(PROMPTS, answers, texts, strict=True):
            assert answer.tokens == text[0, len(prompt) :].tolist()


@needs_compiler
@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe"])
def test_blocks_of_experts_stay_blocks(name: str, tmp_path: Path) -> None:
    """Gates and the other halves in different forms; transformers reads neither of these files."""
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 64, "norm_topk_prob": name != "olmoe"}
    written = write_model(name, tmp_path / "m.gguf", (Form.F32,), **sizes)
    model = load_model(tmp_path / "m.gguf")[0]
    assert all(map(torch.equal, model.parameters(), written.parameters()))
    path = tmp_path / "blocks.gguf"
    write_model(name, path, FORMS, **sizes)
    plain, packed = (Target.load(path, accelerate=mode) for mode in ("off", "packed"))
    file, experts = GgufFile.open(path), packed.model.model.layers[1].mlp.experts
    stored = [tensor.size for name, tensor in file.tensors.items() if "blk.1.ffn" in name and "exps" in name]
    assert experts.gate_up.packed.nbytes + experts.down.packed.nbytes <= 1.1 * sum(stored)
    assert packed.weights_fingerprint == plain.weights_fingerprint
    texts = [generate(target, PROMPTS, "merged", max_new_tokens=16) for target in (plain, packed)]
    assert [answer.tokens for answer in texts[0]] == [answer.tokens for answer in texts[1]]


@needs_compiler
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_transformers_unpacked_gets_its_blocks_back(tied: bool, tmp_path: Path) -> None:
    """Where the values are still the file's; the model itself is not changed."""
    path = tmp_path / "m.gguf"
    write_model("llama", path, tie_word_embeddings=tied)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")  # another file that does not matter
    stock = load_stock(path)
    stock.model.layers[1].mlp.down_proj.weight.data[0, 0] += 1
    ids = torch.tensor(PROMPTS[:1])
    plain = stock.generate(ids, max_new_tokens=16, do_sample=False)
    target = Target(stock, accelerate="packed")
    file, own = GgufFile.open(path), target.model.model.layers
    stored = [file.tensors[f"blk.{layer}.ffn_down.weight"].size for layer in (0, 1)]
    packed = [layer.mlp.down_proj.packed.nbytes for layer in own]
    assert packed[0] <= 1.1 * stored[0] + 64 and packed[1] > 2 * stored[1]
    assert isinstance(target.model.get_input_embeddings(), PackedEmbedding)
    assert type(stock.get_input_embeddings()) is torch.nn.Embedding
    assert generate(target, ids.tolist(), None, max_new_tokens=16)[0].tokens == plain[0, ids.shape[1] :].tolist()


@needs_compiler
def test_a_model_of_another_architecture_stays_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_model, "IN_BLOCKS", ())
    write_model("llama", tmp_path / "m.gguf")
    stock = load_stock(tmp_path / "m.gguf")
    target, weight = Target(stock, accelerate="packed"), stock.model.layers[0].mlp.down_proj.weight
    assert target.model.model.layers[0].mlp.down_proj.packed.nbytes >= weight.numel() * 2  # not in blocks


@needs_compiler
@pytest.mark.parametrize(("name", "bad"), [("llama", "ffn_down.weight"), ("qwen3_moe", "ffn_down_exps.weight")])
def test_a_bad_weight_in_blocks_is_named(name: str, bad: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(name, path, (Form.Q8_0,), intermediate_size=64, moe_intermediate_size=64)
    begin, data = GgufFile.open(path).tensors[f"blk.1.{bad}"].begin, bytearray(path.read_bytes())
    data[begin : begin + 2] = struct.pack("<H", 0x7E00)  # the first block's scale is NaN
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"the weight model\.layers\.1\.mlp\.[.a-z_]*down_proj[.a-z]* has values"):
        Target.load(path, accelerate="packed")


@needs_compiler
def test_an_embedding_is_read_from_the_output_layers_blocks(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "m.gguf", tie_word_embeddings=True)
    model = Target.load(tmp_path / "m.gguf", accelerate="packed").model
    assert model.get_input_embeddings().layer is model.get_output_embeddings()
    assert (
        sum(isinstance(module, PackedLinear) for module in model.modules()) == 2 * 4 + 1
    )  # q, k, v and gate, up are one


def test_other_dtypes_and_modes_are_unpacked(file: Path) -> None:
    for options in ({"dtype": "bfloat16"}, {"dtype": "float64"}, {"accelerate": "off"}):
        model = Target.load(file, **options).model
        assert not isinstance(model.get_input_embeddings(), PackedEmbedding)
        assert getattr(model.config, "quantization_config", None) is None
        assert model.name_or_path == str(file)  # not the cache's folder


def test_without_a_compiler_the_weights_are_unpacked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backend, packed_linear):
        monkeypatch.setattr(module, "load_native_ops", lambda: "no compiler")
    assert not isinstance(Target.load(file).model.get_input_embeddings(), PackedEmbedding)


@needs_compiler
def test_frequencies_of_long_contexts_are_scaled(tmp_path: Path) -> None:
    factors = torch.linspace(1, 8, 8)
    write_model("llama", tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    write_model("llama", tmp_path / "plain.gguf")
    plain = load_model(tmp_path / "plain.gguf")[0].model.rotary_emb.inv_freq
    for accelerate in ("off", "packed"):
        scaled = Target.load(tmp_path / "m.gguf", accelerate=accelerate).model.model.rotary_emb.inv_freq
        assert torch.equal(scaled, plain / factors)


@needs_compiler
@pytest.mark.parametrize("accelerate", ["off", "packed"])
def test_the_config_tells_how_llama_3_scales_frequencies(tmp_path: Path, accelerate: str) -> None:
    """A draft model that is cut out of the target is made from its config."""
    scaled = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 32.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    plain = write_model("llama", tmp_path / "plain.gguf", max_position_embeddings=16384)
    config = deepcopy(plain.config)
    config.rope_parameters = scaled
    made = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    factors = {"rope_freqs.weight": plain.model.rotary_emb.inv_freq / made}
    write_model("llama", tmp_path / "m.gguf", extra=factors, max_position_embeddings=16384)
    target = Target.load(tmp_path / "m.gguf", accelerate=accelerate)
    assert target.config.rope_parameters == scaled
    copied = AutoModelForCausalLM.from_config(target.config)
    assert torch.allclose(copied.model.rotary_emb.inv_freq, target.model.model.rotary_emb.inv_freq)
    assert torch.allclose(copied.model.rotary_emb.inv_freq, made)


@needs_compiler
def test_frequencies_that_a_config_has_scaled_are_not_scaled_again(tmp_path: Path) -> None:
    """The config is that of the model, next to the file."""
    scaled = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    path = tmp_path / "m.gguf"
    model = write_model("llama", path, extra={"rope_freqs.weight": torch.linspace(1, 8, 8)}, rope_parameters=scaled)
    write_description(GgufFile.open(path), tmp_path)
    model.config.save_pretrained(tmp_path)
    assert torch.equal(load_model(path)[0].model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


LINEAR, YARN = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}
LAYERS = {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}
BASE = {"rope_theta": 10000.0}
POSITIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("llama", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, LINEAR | BASE),
    "older": ("llama", {"llama.rope.scale_linear": 4.0}, LINEAR | BASE),
    "yarn": (
        "qwen2",
        {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
        | {"qwen2.rope.scaling.original_context_length": 64},
        YARN | BASE | {"original_max_position_embeddings": 64},
    ),
    "base": ("starcoder2", {}, {"rope_type": "default", "rope_theta": 99999.0}),
    "a share": ("stablelm", {"stablelm.rope.dimension_count": 8}, BASE | {"partial_rotary_factor": 0.5}),
    "some layers": (
        "gemma3_text",
        {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 4.0},
        {"full_attention": LINEAR | BASE, "sliding_attention": {"rope_type": "default"} | BASE},
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_those_of_the_header(name: str, tmp_path: Path) -> None:
    """Also where transformers does not read them."""
    architecture, fields, rope = POSITIONS[name]
    others = {**LAYERS, "query_pre_attn_scalar": 256} if name == "some layers" else {}
    path = tmp_path / "m.gguf"
    written = write_model(architecture, path, (Form.F32,), fields=fields, rope_parameters=rope, **others)
    ids = torch.randint(5, 90, (1, 120), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, expected = load_model(path)[0](ids).logits, written(ids).logits
    assert (found - expected).abs().max() < 1e-3 * expected.std()


@needs_compiler
def test_the_largest_gemmas_scale_queries_as_llama_cpp_does(tmp_path: Path) -> None:
    """By the width of all heads, not by that of one; it knows them by their layers."""
    kinds = ["sliding_attention", "full_attention"] * 23
    config = write_model("gemma2", tmp_path / "m.gguf", num_hidden_layers=46, layer_types=kinds).config
    width = config.hidden_size // config.num_attention_heads
    assert load_model(tmp_path / "m.gguf")[0].config.query_pre_attn_scalar == width != config.query_pre_attn_scalar


def test_a_header_caps_logits(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
    write_model("gemma2", tmp_path / "m.gguf", fields={f"gemma2.{name}": cap for name, cap in caps.items()})
    config = load_model(tmp_path / "m.gguf")[0].config
    assert {name: getattr(config, name) for name in caps} == caps


def test_factors_that_no_config_has_are_refused(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "m.gguf", fields={"llama.rope.scaling.attn_factor": 2.0})
    with pytest.raises(ValueError, match=r"m\.gguf has rope\.scaling\.attn_factor 2\.0, which is not read"):
        load_model(tmp_path / "m.gguf")


def test_unknown_positions_are_refused(tmp_path: Path) -> None:
    fields = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}
    write_model("llama", tmp_path / "m.gguf", fields=fields)
    with pytest.raises(ValueError, match="scales rotary embeddings by 'longrope', and linear and yarn"):
        load_model(tmp_path / "m.gguf")


def test_frequencies_stay_in_float32(file: Path) -> None:
    model = load_model(file, dtype="bfloat16")[0]
    assert model.dtype == torch.bfloat16 and model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_config_and_tokenizer_are_made_once(file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, tokenizer = load_model(file)
    assert capsys.readouterr().err.count("reading the header of m.gguf, once") == 1
    assert tokenizer.eos_token_id == 2 and tokenizer.chat_template.startswith("{% for message")
    assert tokenizer.tokenize("12!#") == ["1", "2", "!#"]  # digits stay apart
    assert load_model(file)[0].generation_config.eos_token_id == 2 and not capsys.readouterr().err
    write_model("llama", file, bos_token_id=1)  # another file in its place
    load_model(file)
    assert "reading the header" in capsys.readouterr().err
    folder = next(path for path in cache.glob("gguf/*") if path.is_dir())
    for part in folder.iterdir():
        (file.parent / part.name).write_bytes(part.read_bytes())
    for path in sorted(cache.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    load_model(file)  # from the files next to it
    assert not capsys.readouterr().err


def rewrite(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return change


def write_after(text: bytes, distance: int, new: bytes) -> Callable[[bytes], bytes]:
    """Write bytes at a distance after a text of the header."""

    def change(data: bytes) -> bytes:
        place = data.index(text) + len(text) + distance
        return data[:place] + new + data[place + len(new) :]

    return change


def name_token(text: bytes) -> bytes:
    """A token as the header has it."""
    return struct.pack("<Q", len(text)) + text


HEADER, UP = r"the header of m\.gguf is damaged or cut off", b"blk.1.ffn_up.weight"
FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another magic": (lambda data: b"GGML" + data[4:], "is no GGUF file: it does not begin with GGUF"),
    "version 1": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "is in version 1 of GGUF"),
    "the header cut off": (lambda data: data[:300], HEADER),
    "the weights cut off": (lambda data: data[:-40], r"is cut off: it has \d+ bytes of \d+"),
    "another architecture": (rewrite(b"llama", b"klama"), "klama"),
    "no architecture": (rewrite(b"general.architecture", b"general.architectura"), "names no architecture"),
    "a token that is not UTF-8": (rewrite(name_token(b"<1>"), name_token(b"<\xff>")), "has a token that is not UTF-8"),
    "a weight of another name": (rewrite(b"blk.1.ffn_up", b"blk.1.ffn_xy"), r"lacks weights .*: blk\.1\.ffn_up"),
    "a value of an unknown kind": (write_after(b"general.architecture", 0, struct.pack("<I", 77)), HEADER),
    "an array of an unknown kind": (write_after(b"tokenizer.ggml.tokens", 4, struct.pack("<I", 77)), HEADER),
    "a row of half a block": (write_after(UP, 4, struct.pack("<Q", 48)), HEADER),
    # After the shape's two sizes.
    "an unknown form": (write_after(UP, 20, struct.pack("<I", 10)), r"has a weight, blk\.1\.ffn_up\.weight, .*type 10"),
}


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_damaged_files_are_refused_in_one_line(name: str, file: Path) -> None:
    change, message = FAULTS[name]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message) as raised:
        load_model(file)
    assert "\n" not in str(raised.value)


def test_weights_of_other_names_are_refused_on_any_path(file: Path) -> None:
    """transformers would fill what is missing with random numbers, and leave out what is too many."""
    file.write_bytes(rewrite(b"blk.1.ffn_up", b"blk.1.ffn_xy")(file.read_bytes()))
    for settings in ({}, {"device_map": "cpu"}):
        with pytest.raises(ValueError, match=r"lacks weights|are missing|does not use"):
            load_model(file, **settings)


def test_a_header_is_that_of_gguf_py(file: Path) -> None:
    from gguf import GGUFReader

    found, expected = GgufFile.open(file), GGUFReader(file)
    assert [*found.tensors] == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        stored = found.tensors[tensor.name]
        assert (stored.begin, stored.size, stored.form) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert stored.shape == tuple(map(int, tensor.shape[::-1]))
    for key, value in found.fields.items():
        assert value == expected.fields[key].contents(), key


def test_missing_packages_are_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is fetched, and if the header was read when the package was there."""
    load_model(file)
    monkeypatch.setattr(description, "is_installed", lambda package: False)
    monkeypatch.setattr(gguf_model, "hf_hub_download", lambda *names: pytest.fail("something is fetched"))
    for name in (file, "owner/repository/m.gguf"):
        with pytest.raises(ValueError, match=r'pip install "draftless\[gguf\]"'):
            load_model(name)


@needs_compiler
def test_a_model_from_elsewhere_needs_no_gguf_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if there is a GGUF file in its folder."""
    model = tiny("llama", dtype=torch.float32)
    model.name_or_path = model.config.name_or_path = str(file.parent)
    monkeypatch.setattr(gguf_model, "is_installed", lambda package: False)
    monkeypatch.setitem(sys.modules, "gguf", None)  # an import fails
    assert generate(Target(model, accelerate="packed"), PROMPTS[1], None, max_new_tokens=2)[0].tokens


UNNAMED = {b"ggml.eos_token_id": b"ggml.xos_token_id", b"ggml.bos_token_id": b"ggml.xos_token_ie", b"</s>": b"</x>"}


def test_no_token_ends_an_answer_that_the_file_does_not_name(file: Path) -> None:
    """Configs have defaults: 2 and 1 are Llama's."""
    data = file.read_bytes()
    for old, new in UNNAMED.items():
        data = rewrite(old, new)(data)
    file.write_bytes(data)
    for accelerate in ("off", "auto"):
        target = Target.load(file, accelerate=accelerate)
        for config in (target.config, target.model.generation_config):
            assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, 0)
        assert target.tokenizer is not None and target.tokenizer.eos_token is None and not target.stop_ids


def test_a_tokenizer_is_the_files_whatever_the_architecture(tmp_path: Path) -> None:
    """AutoTokenizer has a class for Qwen2 with a token that this file lacks."""
    write_model("qwen2", tmp_path / "m.gguf")
    model, tokenizer = load_model(tmp_path / "m.gguf")
    assert len(tokenizer) == model.config.vocab_size and "<|endoftext|>" not in tokenizer.get_vocab()


def test_all_ends_of_a_file_end_an_answer(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "m.gguf", fields={"eot_token_id": 7, "eom_token_id": 8})
    model, tokenizer = load_model(tmp_path / "m.gguf")
    assert model.generation_config.eos_token_id == [2, 7, 8] and Target(model, tokenizer).stop_ids == {2, 7, 8}
    assert model.config.eos_token_id == tokenizer.eos_token_id == 2


def test_files_next_to_a_file_may_lack_a_generation_config(file: Path, tmp_path: Path) -> None:
    write_model("llama", file, fields={"eot_token_id": 7})
    write_description(GgufFile.open(file), file.parent)
    (file.parent / "generation_config.json").unlink()
    assert load_model(file)[0].generation_config.eos_token_id == [2, 7]
    file.write_bytes(rewrite(b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_")(file.read_bytes()))
    assert load_model(file)[0].generation_config.eos_token_id == 2  # the config's
    write_model("llama", file, fields={"eot_token_id": 7})
    intact = file.read_bytes()
    file.write_bytes(rewrite(name_token(b"<1>"), name_token(b"<0>"))(intact))  # twice: damaged, but it is not read
    assert load_model(file)[0].generation_config.eos_token_id == 2
    file.write_bytes(rewrite(name_token(b"<1>"), name_token(b"<\xff>"))(intact))
    assert load_model(file)[0].generation_config.eos_token_id == [2, 7]
    for content, message in (
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
    ):
        (file.parent / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match=rf"tokenizer\.json {message}"):
            load_model(file)


def test_a_description_of_an_older_form_is_made_again(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for form in (1, 2, 2):
        monkeypatch.setattr(description, "FORM", form)
        load_model(file)
    assert capsys.readouterr().err.count("reading the header") == 2
