"""A device of another kind is used as any allows, until a folder describes it better."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import decode.target
from decode import Target, generate
from decode.cpu.backend import CpuBackend
from decode.cuda.backend import CudaBackend
from decode.devices import backend
from decode.devices.backend import Backend, find_backend
from proposers import MergedProposer
from tests.support.models import tiny


def test_backends_are_found_by_the_names_of_their_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, kind in (("cpu", CpuBackend), ("cuda:1", CudaBackend), ("xpu", Backend), ("meta", Backend)):
        found = find_backend(torch.device(device))
        assert type(found) is kind and found.device == torch.device(device)
    other = ModuleType("decode.mps.backend")
    other.BACKEND = type("MpsBackend", (Backend,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "decode.mps.backend", other)
    monkeypatch.setattr(backend, "find_spec", lambda name: name == "decode.mps")
    assert type(find_backend.__wrapped__(torch.device("mps"))) is other.BACKEND


def test_a_device_of_an_unknown_kind_decodes_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, settings = [[5, 6, 7, 5, 6], [8, 9]], {"max_new_tokens": 12, "stop_ids": ()}
    expected = [answer.tokens for answer in generate(Target(tiny("llama")), prompts, None, **settings)]
    monkeypatch.setattr(decode.target, "find_backend", Backend)
    target = Target(tiny("llama"), accelerate="auto", deterministic=True)
    assert type(target.backend) is Backend and target.model.config._attn_implementation == "sdpa"
    for proposer in (None, MergedProposer()):
        found = generate(target, prompts, proposer, **settings)
        assert [answer.tokens for answer in found] == expected
    for mode in ("compiled", "graphs"):
        with pytest.raises(ValueError, match=r"and the model is on cpu; choose auto"):
            Target(tiny("llama"), accelerate=mode)
