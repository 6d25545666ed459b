"""Reading prompts: in passes of any length, the first one without a mask, and without holding all layers' features."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Target, prefill
from decode.devices.backend import Backend, find_backend
from decode.prefill import CHUNK, MASK_BYTES, choose_chunk, lacks_memory, read_texts
from proposers import HEAD_PROPOSERS, MergedProposer
from tests.support.drafting import Recorder, make_head, texts
from tests.support.models import VOCABULARY, tiny

KINDS = ["llama", "llama eager", "mistral window", "gemma3_text", "gpt_oss", "llama4_text", "gpt2", "deepseek_v3"]
LENGTHS = (23, 20, 9, 1)
SINGLE = {"llama eager": 1e-5, "llama4_text": 1e-5}  # errors of models that compute some of it in float32


def make_prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_read_as_by_transformers(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a mask in the first pass; all rows together, the longest many passes long."""
    monkeypatch.setattr(prefill, "CHUNK", chunk)
    target, prompts = Target(tiny(kind)), make_prompts(LENGTHS)
    expected = [target.model(torch.tensor([prompt]), output_hidden_states=True) for prompt in prompts]
    for needs_masks in (False, True):
        target.needs_masks = needs_masks
        with torch.inference_mode():
            logits, features = read_texts(target.open(len(prompts), [1, -1]), prompts)
        assert features is not None
        for row, (prompt, output) in enumerate(zip(prompts, expected, strict=True)):
            states = torch.cat([output.hidden_states[1], output.hidden_states[-1]], dim=2)[0]
            error = SINGLE.get(kind, 1e-9)
            torch.testing.assert_close(logits[row], output.logits[0, -1], rtol=error, atol=error)
            torch.testing.assert_close(features[row, : len(prompt)], states, rtol=error, atol=error)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_the_first_pass_has_no_mask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "CHUNK", 16)
    target = Target(tiny(kind))
    seen: list[bool] = []
    target.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"] is None), with_kwargs=True
    )
    read_texts(target.open(2), make_prompts((40, 38)))
    assert seen == [True, False, False]
    seen.clear()
    read_texts(target.open(1), make_prompts((1,)))  # the model would attend to unused slots
    assert seen == [False]


def test_passes_are_as_long_as_the_device_pays() -> None:
    def choose(device: str, rows: int, longest: int, dtype: torch.dtype = torch.bfloat16, **others: Any) -> int:
        shape = SimpleNamespace(num_attention_heads=8, num_key_value_heads=others.pop("groups", 8))
        facts = SimpleNamespace(sees_all=others.pop("sees_all", True))
        others = {"sees_texts_whole": False, "facts": facts} | others
        target: Any = SimpleNamespace(backend=find_backend(torch.device(device)), dtype=dtype, config=shape, **others)
        return choose_chunk(target, rows, longest)

    assert choose("cpu", 1, 100_000) == CHUNK
    assert choose("cuda", 1, 2000) == Backend.pass_tokens
    assert choose("cuda", 1, 32_768) == 4096 and MASK_BYTES == 4096 * 32_768 * 2
    assert choose("cuda", 1, 32_768, groups=2) == 1024  # the mask is repeated for four heads
    assert choose("cuda", 4, 2000) == 2048
    assert choose("cuda", 16, 100_000, torch.float32) == CHUNK
    assert choose("cuda", 1, 32_768, sees_texts_whole=True) == Backend.pass_tokens  # without a mask
    assert choose("cuda", 1, 32_768, sees_texts_whole=True, sees_all=False) == 4096


def make_proposer(name: str, target: Target) -> Any:
    kind = "eagle3" if name == "merged" else name.split()[0]
    head = HEAD_PROPOSERS[kind](make_head(kind, target, prefix="prefix" in name), nodes=12)
    return MergedProposer(drafter=head, nodes=12) if name == "merged" else head


@pytest.mark.parametrize("name", ["medusa", "hydra", "hydra prefix", "eagle", "eagle3", "merged"])
def test_drafts_stay_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees and texts, if prompts are read in many passes. The features of each pass are fused."""
    target, prompts = Target(tiny("llama", num_hidden_layers=4)), make_prompts((40, 23, 9))
    plain = texts(target, prompts, None, max_new_tokens=12, stop_ids=[])
    found = []
    for chunk in (512, 6):
        monkeypatch.setattr(prefill, "CHUNK", chunk)
        recorder = Recorder(make_proposer(name, target))
        assert texts(target, prompts, recorder, max_new_tokens=12, stop_ids=[]) == plain
        found.append([(tree.tokens.tolist(), tree.parents.tolist()) for tree in recorder.trees])
    assert found[0] == found[1]


def test_a_long_prompt_holds_one_passs_features_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are gone before the next pass begins: they would take gigabytes."""
    monkeypatch.setattr(prefill, "CHUNK", 32)
    target, length = Target(tiny("llama", num_hidden_layers=4)), 200
    proposer, width = make_proposer("eagle3", target), target.config.hidden_size
    proposer.begin(target)
    parts: list[weakref.ref[Tensor]] = []

    def fuse(part: Tensor) -> Tensor:
        assert part.shape[2] == 3 * width and not any(earlier() is not None for earlier in parts)
        parts.append(weakref.ref(part))
        return proposer.fuse(part)

    with torch.inference_mode():
        _, features = read_texts(target.open(1, proposer.layers), make_prompts((length,)), fuse)
    assert features is not None and features.shape == (1, length, width) and len(parts) == 7


@pytest.mark.parametrize("lengths", [(8, 5, 20), (20, 8, 5, 9, 13), (5, 8, 7, 14)])
def test_texts_that_end_in_different_passes_have_logits_of_their_own(
    lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat passes reuse the memory of their logits."""
    monkeypatch.setattr(prefill, "CHUNK", 10)
    target, prompts = Target(tiny("llama", dtype=torch.float32), accelerate="packed"), make_prompts(lengths)
    assert target.passes_flat
    with torch.inference_mode():
        logits, _ = read_texts(target.open(len(prompts)), prompts)
    for row, prompt in enumerate(prompts):
        expected = target.model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried", True),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_missing_memory_is_known_by_its_messages(message: str, expected: bool) -> None:
    """The device is lost after others."""
    assert lacks_memory(RuntimeError(message)) == expected
