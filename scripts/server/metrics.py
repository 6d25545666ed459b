"""What `/metrics` tells, under the names that vLLM gives to the same figures, so that its dashboards show them."""

from __future__ import annotations

from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from decode import Chunk, Engine
from draftless_commands.server.replies import REASONS

ENDS = REASONS | {"cancelled": "abort", "error": "error"}  # vLLM's words for the ends of answers
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)  # of histograms


class Metrics:
    """The figures of one server since it began."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.registry = registry = CollectorRegistry()

        def count(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", about, ["model_name", *labels], registry=registry)

        def measure(name: str, about: str) -> Histogram:
            return Histogram(f"vllm:{name}", about, ["model_name"], buckets=SECONDS, registry=registry).labels(model)

        self.model = model
        self.prompts = count("prompt_tokens", "tokens of prompts").labels(model)
        self.tokens = count("generation_tokens", "tokens of answers").labels(model)
        self.ended = count("request_success", "answers that have ended", "finished_reason")
        self.drafts = count("spec_decode_num_drafts", "steps with draft tokens").labels(model)
        self.drafted = count("spec_decode_num_draft_tokens", "draft tokens that were verified").labels(model)
        self.accepted = count("spec_decode_num_accepted_tokens", "draft tokens that were accepted").labels(model)
        self.by_position = count("spec_decode_num_accepted_tokens_per_pos", "the same by depth", "position")
        self.first = measure("time_to_first_token_seconds", "from a request to the first token of its answer")
        self.next = measure("inter_token_latency_seconds", "between the tokens of an answer")
        self.whole = measure("e2e_request_latency_seconds", "from a request to the end of its answer")
        for name, about, find in (
            ("num_requests_running", "requests that are decoded", lambda: engine.running),
            ("num_requests_waiting", "requests that wait, or whose prompts are read", lambda: engine.waiting),
        ):
            Gauge(f"vllm:{name}", about, ["model_name"], registry=registry).labels(model).set_function(find)

    def write(self) -> bytes:
        return generate_latest(self.registry)


class Watch:
    """The times of one request, from when it was added."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._is_first = metrics, True
        self._began = self._last = perf_counter()

    def take(self, chunk: Chunk) -> None:
        """Take in what a step added to the answer."""
        metrics, now, stats = self._metrics, perf_counter(), chunk.stats
        if chunk.tokens and self._is_first:
            metrics.first.observe(now - self._began)
            self._is_first = False
        else:
            for _ in chunk.tokens:
                metrics.next.observe((now - self._last) / len(chunk.tokens))
        self._last = now
        metrics.tokens.inc(len(chunk.tokens))
        metrics.drafts.inc(stats.nodes > 0)
        metrics.drafted.inc(stats.nodes)
        metrics.accepted.inc(sum(stats.accepted_by_depth))
        for depth, accepted in enumerate(stats.accepted_by_depth):
            metrics.by_position.labels(metrics.model, str(depth)).inc(accepted)

    def end(self, finish: str) -> None:
        """Count the request's end."""
        self._metrics.ended.labels(self._metrics.model, ENDS[finish]).inc()
        self._metrics.whole.observe(perf_counter() - self._began)
