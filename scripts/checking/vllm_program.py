"""A stand-alone program that answers prompts offline in vLLM, with or without a head. It needs nothing of Draftless.

It reads the request of `serving.serve_head` as JSON from stdin and prints one JSON object: the fields of
`serving.Answers`, or `error`, vLLM's own reason in one line.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an error is then raised here, with its own reason
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; a few short prompts need less
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # as many threads as OMP_NUM_THREADS says, on any core
    "VLLM_NO_USAGE_STATS": "1",
}
COUNTS = "vllm:spec_decode_num_"


def main() -> None:
    results = os.dup(1)
    os.dup2(2, 1)  # what vLLM prints is not the result
    try:
        result = answer(json.load(sys.stdin))
    except Exception as error:
        result = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    with os.fdopen(results, "w") as file:
        json.dump(result, file)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answers to the prompts, and how many draft tokens were accepted at each position."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import vllm

    prompts, drafted, limit = (request[name] for name in ("prompts", "draft_tokens", "max_new_tokens"))
    speculation = request["speculation"]
    engine = vllm.LLM(
        request["model"],
        dtype=request["dtype"],
        max_model_len=max(map(len, prompts)) + limit + drafted + 1,
        max_num_seqs=len(prompts),
        enforce_eager=True,  # compiling would take longer than a few prompts
        disable_log_stats=False,  # the counts
        speculative_config=speculation,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=request["stop_ids"])
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    counts = {each.name: each for each in engine.get_metrics()} if speculation else {}
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": counts[f"{COUNTS}drafts"].value if counts else 0,
        "accepted": list(counts[f"{COUNTS}accepted_tokens_per_pos"].values) if counts else [],
        "versions": {"vllm": vllm.__version__, **{name: version(name) for name in ("torch", "transformers")}},
    }


if __name__ == "__main__":
    main()
