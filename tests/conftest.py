"""Options and fixtures for several tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import decode.costs
from decode import Target
from decode.cpu import compiled_layers, layer_kernel
from decode.cpu.layer_kernel import Kernel, LayerCall
from decode.cpu.native_ops import load_native_ops
from decode.devices import user_cache
from tests.support.commands import Call, Run
from tests.support.models import USUAL_COSTS, VOCABULARY, limit_threads, tiny

END = 2
LARGEST = 12  # cases: a test with more is large. The default run has a third of its cases, but no fewer than these
WHOLE_RUN = 1000  # tests; smaller runs, such as a file's, have all cases
PROGRAMS: dict[str, Any] = {}  # exported layers, by the name of the kernel's file


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=1000, help="number of random cases of the losslessness test")
    parser.addoption("--questions", help="a JSONL file in Spec-Bench's format; slow tests answer 60 of its questions")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The default run has a sample of the cases of large tests, always the same. The others get the mark `rest`."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items if len(items) > WHOLE_RUN else ():
        if not any(item.get_closest_marker(name) for name in ("slow", "gpu")):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        shuffled = sorted(cases, key=lambda case: crc32(case.nodeid.encode()))
        for case in shuffled[max(LARGEST, len(cases) // 3) :]:
            case.add_marker(pytest.mark.rest)


@pytest.fixture(autouse=True)
def speed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread is enough for tiny models. Measuring what their passes cost would take longer than most tests."""
    is_quick = not any(request.node.get_closest_marker(name) for name in ("slow", "gpu"))
    if is_quick:
        monkeypatch.setattr(decode.costs, "measure_cost_curve", lambda *_: USUAL_COSTS)
    with limit_threads(1 if is_quick else torch.get_num_threads()):
        yield


@pytest.fixture(scope="session", autouse=True)
def caches(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is kept in the user's folder: kernels stay once per checkout, cost curves until the end of the run."""
    kernels, curves = pytestconfig.cache.mkdir("kernels"), tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        keep_kernels_in(kernels, patch)
        patch.setattr(decode.costs, "user_cache", lambda: curves)
        yield


def keep_kernels_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    for module in (user_cache, compiled_layers):
        patch.setattr(module, "build_folder", lambda: folder)


@pytest.fixture
def kernel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the kernels of one test, in which nothing is loaded yet but the ops."""
    load_native_ops()
    folder = tmp_path / "kernels"
    keep_kernels_in(folder, monkeypatch)
    monkeypatch.setattr(compiled_layers, "_LOADED", {})
    monkeypatch.setattr(user_cache, "_TOLD", set())
    return folder


@pytest.fixture
def exported(kernel_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Layers run the programs that their kernels would be compiled from, for compiling takes many seconds.

    A name tells all but the weights, so tests share programs. Returns a list of the kernels that run, by name.
    """
    calls: list[str] = []
    compile_kernel = compiled_layers.compile_kernel

    def compile_once(layer: nn.Module, call: LayerCall, dimensions: Any, into: Path) -> None:
        if into.name in PROGRAMS:
            layer_kernel.build_library(PROGRAMS[into.name], into)
        else:
            compile_kernel(layer, call, dimensions, into)

    def keep(program: Any, into: Path) -> None:
        if into.name not in PROGRAMS:
            PROGRAMS[into.name] = program.module(check_guards=False)  # kernels check nothing either
        into.write_text("a program")

    def load(path: Path) -> Kernel:
        program = PROGRAMS[path.name]

        def run(weights: list[Tensor], inputs: list[Tensor], stored: list[Tensor]) -> list[Tensor]:
            layers = len(stored) // 2
            for layer in range(layers):
                calls.append(path.stem)
                own, its = (each[len(each) * layer // layers :][: len(each) // layers] for each in (weights, stored))
                with torch.no_grad(), torch.inference_mode(its[0].is_inference()):  # as the cache was made
                    outputs = list(program([each.detach() for each in (*own, *inputs, *its)]))  # without gradients
                inputs = [outputs[0], *inputs[1:]]
            return outputs

        return run

    monkeypatch.setattr(layer_kernel, "build_library", keep)
    monkeypatch.setattr(compiled_layers, "compile_kernel", compile_once)
    monkeypatch.setattr(compiled_layers, "load_kernel", load)
    return calls


@pytest.fixture(scope="module")
def target() -> Target:
    """The target of most tests that need one."""
    return Target(tiny("llama"))


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a tiny model, and a tokenizer with a token for each ASCII character. Returns the folder."""
    tokens = ["<pad>", "<s>", "</s>", *map(chr, range(32, 32 + VOCABULARY - 3))]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = "{% for each in messages %}{{ each.role[0] }}:{{ each.content }} {% endfor %}a:"

    def save(kind: str = "llama", **overrides: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        model = tiny(kind, **overrides)
        model.generation_config.eos_token_id = END
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command's `main` in this process."""

    def run(main: Callable[[list[str]], None], *arguments: str | Path) -> Run:
        capsys.readouterr()
        status: Any = 0
        try:
            main([*map(str, arguments)])
        except SystemExit as end:
            status = end.code
        return Run(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def place(save_model: Callable[..., Path]) -> Path:
    """A folder with a predictable model and 200 of its answers. Tests do not change it."""
    from tests.support.training_runs import save_predictable  # imports the commands

    return save_predictable(save_model(dtype=torch.float32, num_hidden_layers=1), rows=200)
