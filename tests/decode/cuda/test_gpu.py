"""On a GPU: losslessness in every dtype and mode, one synchronization a step, attention kernels, growth, training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from decode import Engine, Proposer, Request, Sampling, Target, Tree, generate
from decode.cuda import graph
from decode.hf.speculate import speculate
from proposers import HEAD_PROPOSERS, DraftProposer, MergedProposer, NGramProposer
from tests.support.drafting import make_head, texts
from tests.support.enumeration import compare_third_tokens
from tests.support.models import VOCABULARY, tiny
from tests.support.training_runs import losses, save_predictable, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10, 11, 7, 8], [3], [4, 4, 20, 21, 22, 4, 4, 20]]
KINDS = ["llama", "mistral window", "gemma3_text", "gpt2"]
LONG = {"max_position_embeddings": 8192, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128}


@pytest.fixture(autouse=True)
def notices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What users would read about graphs that could not be captured."""
    told: list[str] = []
    monkeypatch.setattr(graph, "print_notice", told.append)
    return told


def proposers(target: Target) -> list[Proposer | None]:
    heads = [
        HEAD_PROPOSERS[kind](make_head(kind, target), nodes=nodes) for kind in HEAD_PROPOSERS for nodes in (12, None)
    ]
    drafts = [DraftProposer(target, depth=3, nodes=4), DraftProposer(target, width=2, depth=3, nodes=7)]
    return [None, NGramProposer(length=4), *drafts, *heads]


def on_gpu(kind: str, dtype: torch.dtype, accelerate: str = "off") -> Target:
    return Target(tiny(kind, dtype=dtype).cuda(), accelerate=accelerate)


@pytest.mark.parametrize("accelerate", ["off", "graphs"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens(
    kind: str, dtype: torch.dtype, temperature: float, accelerate: str, notices: list[str]
) -> None:
    target = on_gpu(kind, dtype, accelerate)
    settings = {"sampling": Sampling(temperature=temperature, top_p=0.9, seed=3), "max_new_tokens": 24}
    plain = texts(on_gpu(kind, dtype), PROMPTS, None, batch_size=1, **settings)
    for proposer in proposers(target):
        for batch_size in (1, 4):
            assert texts(target, PROMPTS, proposer, batch_size=batch_size, **settings) == plain
    assert not notices


@pytest.mark.parametrize("accelerate", ["off", "graphs"])
@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_text_does_not_depend_on_company(kind: str, accelerate: str, notices: list[str]) -> None:
    """Requests join at any step, with ways to sample of their own, and one is cancelled."""
    target, plain = on_gpu("llama", torch.float64, accelerate), on_gpu("llama", torch.float64)
    made = {"ngram": lambda: NGramProposer(length=4), "eagle3": lambda: make_eagle3(target)}[kind]()
    engine, requests = Engine(target, made, rows=4, part=3), list[Request]()
    for number in range(10):
        sampling = Sampling(temperature=(0.0, 0.8)[number % 3 == 1], top_p=0.9, seed=number)
        requests.append(engine.add(PROMPTS[number % 4], sampling=sampling, max_new_tokens=12 + number, stop_ids=[]))
        engine.step()
        engine.step()
    engine.cancel(requests[-1])
    assert all(engine) and requests[-1].answer is not None and requests[-1].answer.finish == "cancelled"
    for request in requests[:-1]:
        settings = {"sampling": request.sampling, "max_new_tokens": request.limits.max_new_tokens, "stop_ids": []}
        (alone,) = generate(plain, [request.prompt], None, request_ids=[request.request_id], **settings)
        assert request.answer is not None and request.answer.tokens == alone.tokens
    assert not notices


def make_eagle3(target: Target) -> Proposer:
    return HEAD_PROPOSERS["eagle3"](make_head("eagle3", target, layers=2), nodes=12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_differs_at_near_ties_only(kind: str, dtype: torch.dtype) -> None:
    target = on_gpu(kind, dtype)
    plain = generate(target, PROMPTS, None, max_new_tokens=24, batch_size=1)
    for proposer in proposers(target):
        for answer, expected in zip(generate(target, PROMPTS, proposer, max_new_tokens=24), plain, strict=True):
            if answer.tokens != expected.tokens:
                pairs = zip(answer.tokens, expected.tokens, strict=False)
                place = next(index for index, (one, other) in enumerate(pairs) if one != other)
                ids = torch.tensor([answer.prompt + answer.tokens[:place]], device="cuda")
                logits = target.model(ids).logits[0, -1].float()
                best, second = logits.topk(2).values
                assert best - second < 0.1 * logits.std()


@pytest.mark.parametrize("accelerate", ["off", "packed", "graphs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_texts(dtype: torch.dtype, accelerate: str, notices: list[str]) -> None:
    """In half precision they are seen without a mask. Each token is the best by transformers, but for rounding."""
    model = tiny("llama", dtype=dtype, **LONG).cuda()
    target = Target(model, accelerate=accelerate)
    assert target.sees_texts_whole == (dtype == torch.bfloat16 and accelerate != "off")
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=draw).tolist() for length in (2600, 2600, 3000)]
    prompts = [[*prompt, *prompt[:40], *prompt[:20]] for prompt in prompts]
    merged = MergedProposer(drafter=DraftProposer(target, depth=3, width=2), nodes=9)
    for proposer in (None, NGramProposer(length=4), make_eagle3(target), MergedProposer(nodes=9), merged):
        for batch_size in (1, 3):
            settings = {"max_new_tokens": 40, "batch_size": batch_size, "stop_ids": []}
            for answer in generate(target, prompts, proposer, **settings):
                ids = torch.tensor([answer.prompt + answer.tokens], device="cuda")
                with torch.no_grad():
                    logits = model(ids).logits[0, len(answer.prompt) - 1 : -1].float()
                chosen = logits.gather(1, torch.tensor(answer.tokens, device="cuda")[:, None])[:, 0]
                gap = (logits.max(dim=1).values - chosen) / logits.std(dim=1)
                assert gap.max() < (0.1 if dtype == torch.bfloat16 else 1e-3)
    assert not notices


def test_passes_of_new_shapes_take_no_longer() -> None:
    """cuDNN would make a plan for each number of nodes and slots."""
    session, times = on_gpu("llama", torch.bfloat16, "packed").open(1), list[float]()
    for step in range(60):
        tree = Tree.chain([[5] * (1 + step % 13)])
        torch.cuda.synchronize()
        begun = perf_counter()
        session.verify(tree)
        torch.cuda.synchronize()
        times.append(perf_counter() - begun)
        session.keep([[*range(tree.width // 3 + 1)]])
    assert max(times[30:]) < 0.03


@pytest.mark.parametrize("accelerate", ["packed", "graphs"])
def test_attention_runs_the_kernels_that_were_chosen(accelerate: str) -> None:
    """No cuDNN, and flash attention where no mask is needed: for prompts, and for a plain step but in a graph."""
    model = tiny("llama", dtype=torch.bfloat16, **LONG).cuda()
    target = Target(model, accelerate=accelerate)
    settings = {"max_new_tokens": 8, "stop_ids": []}
    for proposer in (None, NGramProposer(length=4)):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            generate(target, [[5, 9, 7, 8] * 40], proposer, **settings)
        names = {event.key for event in profiled.key_averages()}
        assert any("flash" in name for name in names) and not any("cudnn" in name for name in names), names


def test_a_model_that_waits_goes_on_without_graphs(notices: list[str]) -> None:
    """Capturing fails once, when it is loaded. torch's allocator works afterwards, and so do graphs of other models."""
    model, plain = tiny("llama", dtype=torch.float32).cuda(), on_gpu("llama", torch.float32)
    expected = texts(plain, PROMPTS, None, max_new_tokens=12)

    def wait(*_: Any) -> None:
        torch.ones(1, device="cuda").item()

    with model.model.layers[0].register_forward_pre_hook(wait):
        with pytest.raises(ValueError, match="cannot have CUDA graphs"):
            Target(model, accelerate="graphs")
        target = Target(model, accelerate="auto")
        assert not target.has_graphs and len(notices) == 2
        torch.cuda.empty_cache()
        assert texts(target, PROMPTS, None, max_new_tokens=12) == expected
    for _ in range(2):
        target = Target(model, accelerate="auto")
        assert target.has_graphs
        assert texts(target, PROMPTS, None, max_new_tokens=12) == expected
        torch.cuda.empty_cache()
    assert len(notices) == 2


def test_caches_grow_and_batches_change(notices: list[str]) -> None:
    """Graphs are captured anew for a cache that has moved, and used again for batches of other sizes."""
    target = on_gpu("llama", torch.float64, "graphs")
    plain = on_gpu("llama", torch.float64)
    settings = {"max_new_tokens": 300, "stop_ids": []}
    expected = texts(plain, PROMPTS, None, batch_size=1, **settings)
    for rows in (3, 1, 4):
        assert texts(target, PROMPTS[:rows], NGramProposer(length=4), batch_size=4, **settings) == expected[:rows]
    assert not notices


@pytest.mark.parametrize("accelerate", ["off", "packed", "graphs"])
def test_generate_by_transformers(accelerate: str) -> None:
    model = tiny("llama", dtype=torch.float32).cuda()
    ids, settings = torch.tensor([PROMPTS[1]], device="cuda"), {"max_new_tokens": 24, "do_sample": False}
    drafting = {"proposer": make_eagle3(Target(model)), "accelerate": accelerate}
    found = model.generate(ids, custom_generate=speculate, **drafting, **settings)
    assert torch.equal(found, model.generate(ids, **settings))


def test_a_head_is_trained(save_model: Callable[..., Path], tmp_path: Path) -> None:
    place = save_predictable(save_model(dtype=torch.float32, num_hidden_layers=1), rows=200)
    options = ["--epochs", "2", "--validate-every", "4", "--lr", "1e-2", "--device", "cuda", "--dtype", "bfloat16"]
    for kind in ("medusa", "eagle3"):
        assert train(place, tmp_path / kind, "--kind", kind, *options) == 0
        first, *_, last = (row["loss"] for row in losses(tmp_path / kind))
        assert last < 0.8 * first


def test_flex_attention() -> None:
    """It is compiled for each shape, so there are few steps."""
    model = tiny("llama", dtype=torch.float32, **LONG | {"head_dim": 16}).cuda()
    prompt, settings = PROMPTS[1], {"max_new_tokens": 8, "stop_ids": []}
    (expected,) = generate(Target(model), [prompt], None, **settings)
    model.set_attn_implementation("flex_attention")
    (answer,) = generate(Target(model), [prompt], NGramProposer(length=4), **settings)
    assert answer.tokens == expected.tokens


def test_sampled_drafts_keep_the_distribution() -> None:
    target = Target(tiny("llama", vocab_size=12, initializer_range=0.3, dtype=torch.float32).cuda())
    draft = Target(tiny("llama", vocab_size=12, num_hidden_layers=1, dtype=torch.float32).cuda())
    answers = []
    for seed, proposer in enumerate([None, DraftProposer(draft, sampled=True, depth=3, nodes=4)]):
        sampling = Sampling(temperature=1.0, seed=seed)
        answers.append(generate(target, [[3, 4]] * 2400, proposer, sampling=sampling, max_new_tokens=3, stop_ids=[]))
    assert compare_third_tokens(*answers) < 31.3  # 11 degrees of freedom, p = 0.001


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_step_synchronizes_once(temperature: float) -> None:
    """To read what was accepted."""
    target = on_gpu("llama", torch.float32)
    proposer = NGramProposer(length=4)
    settings = {"sampling": Sampling(temperature=temperature, seed=1), "stop_ids": [], "max_new_tokens": 64}
    generate(target, [[5, 6, 5, 6, VOCABULARY - 1]], proposer, **settings)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer = generate(target, [[5, 6, 5, 6, VOCABULARY - 1]], proposer, **settings)[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    syncs = [warning for warning in caught if "synchron" in str(warning.message)]
    assert len(syncs) <= answer.stats.steps + 5  # a few while the prompt is read
