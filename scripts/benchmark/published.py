"""Published heads and MTP modules with the tau that was measured with them, as presets of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MT_BENCH, SPEC_BENCH = "MT-bench, 80 first turns", "Spec-Bench, 480 questions"

# Vicuna's tokenizer has none. This is FastChat's.
VICUNA = (
    "{{ bos_token }}A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. {% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} "
    "{% else %}ASSISTANT: {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def chain(tokens: int) -> str:
    """The options of a method that drafts so many tokens in a row."""
    return f"nodes={tokens + 1},depth={tokens},width=1"  # the root is a node, too


@dataclass(frozen=True)
class Published:
    """A head on a hub, its target, and one published measurement.

    model, head: hub ids; None is the module in the model's own checkpoint. method: the proposer's name and options.
    questions: what was asked. tau: the published one, or None if none was found. source: its address, or where the
    module is described. parameters: of both, in billions. tolerance: the relative difference that is allowed.
    template: options of the chat template. chat_template: for a tokenizer that has none. by_task: the published tau is
    the mean of the tasks' taus.
    """

    name: str
    model: str
    head: str | None
    method: str
    questions: str
    tau: float | None
    source: str
    parameters: float
    max_new_tokens: int = 1024
    tolerance: float = 0.1
    template: tuple[tuple[str, Any], ...] = ()
    chat_template: str | None = None
    by_task: bool = False

    @property
    def memory(self) -> float:
        """GiB of the weights of both in bfloat16."""
        return self.parameters * 1e9 * 2 / 2**30


ANGELSLIM = "https://angelslim.readthedocs.io/zh-cn/latest/performance/speculative_decoding/benchmarks.html"
LEADERBOARD = "https://github.com/hemingkx/Spec-Bench/blob/main/Leaderboard.md"
PUBLISHED = {
    each.name: each
    for each in (
        Published(
            "eagle3-llama-3.1-8b",
            "meta-llama/Llama-3.1-8B-Instruct",
            "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
            f"eagle3:{chain(7)}",
            MT_BENCH,
            3.53,
            "https://github.com/vllm-project/vllm/issues/26191",
            8.03 + 0.42,
            max_new_tokens=256,
        ),
        Published(
            "eagle3-llama-3.3-70b",
            "meta-llama/Llama-3.3-70B-Instruct",
            "nebius/EAGLE3-Llama-3.3-70B-Instruct",
            f"eagle3:{chain(7)}",
            "MT-bench, HumanEval and GSM8K",
            4.81,
            "https://huggingface.co/nebius/EAGLE3-Llama-3.3-70B-Instruct",
            70.55 + 1.40,
            by_task=True,
        ),
        Published(
            "eagle3-qwen3-8b",
            "Qwen/Qwen3-8B",
            "AngelSlim/Qwen3-8B_eagle3",
            f"eagle3:{chain(2)}",
            MT_BENCH,
            1.97,
            ANGELSLIM,
            8.19 + 0.40,
        ),
        Published(
            "eagle3-qwen3-30b-a3b",
            "Qwen/Qwen3-30B-A3B",
            "AngelSlim/Qwen3-a3B_eagle3",
            f"eagle3:{chain(2)}",
            MT_BENCH,
            2.01,
            ANGELSLIM,
            30.53 + 0.2,
        ),
        Published(
            "medusa-vicuna-7b",
            "lmsys/vicuna-7b-v1.3",
            "FasterDecoding/medusa-vicuna-7b-v1.3",
            "medusa:nodes=64",
            SPEC_BENCH,
            2.31,
            LEADERBOARD,
            6.74 + 0.74,
            tolerance=0.15,
            chat_template=VICUNA,
        ),
        Published(
            "eagle-vicuna-7b",
            "lmsys/vicuna-7b-v1.3",
            "yuhuili/EAGLE-Vicuna-7B-v1.3",
            "eagle:nodes=60,depth=6,width=10",
            SPEC_BENCH,
            4.34,
            LEADERBOARD,
            6.74 + 0.37,
            chat_template=VICUNA,
        ),
        Published(
            "dflash-qwen3-8b",
            "Qwen/Qwen3-8B",
            "z-lab/Qwen3-8B-DFlash-b16",
            f"dflash:{chain(8)}",
            MT_BENCH,
            2.93,
            "https://github.com/vllm-project/vllm/pull/32206",
            8.19 + 1.05,
            max_new_tokens=256,
            template=(("enable_thinking", False),),
        ),
        Published(
            "peagle-qwen3-8b",
            "Qwen/Qwen3-8B",
            "RedHatAI/Qwen3-8B-speculator.peagle",
            f"peagle:{chain(7)}",
            MT_BENCH,
            3.03,
            "https://huggingface.co/RedHatAI/Qwen3-8B-speculator.peagle",
            8.19 + 1.6,
            tolerance=0.15,
        ),
        Published(
            "mtp-qwen3.5-0.8b",
            "Qwen/Qwen3.5-0.8B",
            None,
            f"mtp:{chain(3)}",
            "8 requests, not published; take MT-bench",
            2.74,
            "https://github.com/ModelTC/LightLLM/pull/1402",
            0.87,
            max_new_tokens=256,
            tolerance=0.2,
        ),
        Published(
            "mtp-glm-4.5-air",
            "zai-org/GLM-4.5-Air",
            None,
            f"mtp:{chain(3)}",
            MT_BENCH,
            None,
            "https://docs.sglang.io/basic_usage/glm45.html",
            106 + 3.5,
        ),
    )
}
