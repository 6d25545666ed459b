"""Draftless and other servers under load: latency and throughput at Poisson arrivals, with and without drafts.

    python docs/measure/load.py --questions spec_bench_dev.jsonl --server none="draftless serve --proposer none" ...

The client is Locust, which takes little of the machine that it shares with the server: `pip install locust`, in an
environment of its own. A closed loop of 8 requests at a time finds the rate that the first server sustains. Then each
server answers the same prompts, greedily, at the same random times, at shares of that rate. Each run starts its server
anew: an older one has the prompts in its cache and drafts from their answers. Above 100 % the queue grows to the end,
so Draftless needs `--queue REQUESTS`. Idle machines only.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import gevent
import locust
from locust.env import Environment

STREAMS = 8  # in the closed loop
Run = dict[str, Any]


class Reader(locust.HttpUser):
    """Asks one question and reads the answer as it streams; in the closed loop, one after the other."""

    prompts: list[str]  # what is left
    body: Run
    once: bool
    runs: list[Run]  # what was answered

    @locust.task
    def ask(self) -> None:
        if not self.prompts:
            raise locust.exception.StopUser
        prompt = self.prompts.pop()
        begun, run = time.perf_counter(), Run(prompt=prompt, text="", tokens=0)
        body = self.body | {"messages": [{"role": "user", "content": prompt}]}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code == 200:
                self.read(response, run, begun)
            run["seconds"] = time.perf_counter() - begun
            response.request_meta["response_time"] = 1000 * run["seconds"]
        self.runs.append(run | {"status": response.status_code})
        if self.once:
            raise locust.exception.StopUser

    def read(self, response: Any, run: Run, begun: float) -> None:
        for line in response.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            piece = json.loads(line.removeprefix(b"data: "))
            text = "".join(choice["delta"].get("content") or "" for choice in piece.get("choices", []))
            if text and not run["text"]:
                run["first"] = time.perf_counter() - begun
            run["text"] += text
            run["tokens"] = (piece.get("usage") or {}).get("completion_tokens", run["tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--questions", type=Path, required=True, metavar="FILE", help="JSON lines with turns")
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--loads", default="25,50,100,150", help="percent of the rate")
    parser.add_argument("--rate", type=float, help="100 %%, in requests per second; default: what the first sustains")
    parser.add_argument("--requests", type=int, default=200, help="per run, each with a question of its own")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add each run there, with all its answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8000, help="where the servers listen")
    options = parser.parse_args()
    servers = dict(each.split("=", 1) for each in options.server)
    questions = [json.loads(line)["turns"][0] for line in options.questions.read_text(encoding="utf-8").splitlines()]
    prompts = random.Random(options.seed).sample(questions, len(questions))[: options.requests]
    rate, first = options.rate, next(iter(servers))
    runs: list[Run] = []
    expected: dict[str, str] = {}
    for load in [0] * (rate is None) + [int(load) for load in options.loads.split(",")]:
        for name in servers if load else [first]:
            answers, lasted = serve(servers[name], prompts, (rate or 0) * load / 100, options)
            expected = expected or {run["prompt"]: run["text"] for run in answers}
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"server": name, "load": load, "answers": answers}) + "\n")
            runs.append({"server": name, "load": load} | figures(answers, lasted, prompts, expected))
            rate = rate or runs[0]["requests/s"]
            print(json.dumps(runs[-1]), flush=True)
    print(f"\nLocust {locust.__version__}; 100 %: {rate:.3f} requests/s; 0 %: the closed loop\n")
    print_table(runs)
    plain = {run["load"]: run for run in runs if run["server"] == first}
    if others := [run for run in runs if run["server"] != first and run["load"] in plain]:
        print(f"\nRatios to {first}:\n")
        print_table([{name: ratio(each, plain[run["load"]][name]) for name, each in run.items()} for run in others])


def ratio(value: Any, plain: Any) -> Any:
    return value / plain if isinstance(value, float) else value


def print_table(runs: list[Run]) -> None:
    print(f"| {' | '.join(runs[0])} |\n|{'---|' * len(runs[0])}")
    for run in runs:
        print(f"| {' | '.join(f'{each:.4g}' if isinstance(each, float) else str(each) for each in run.values())} |")


def figures(answers: list[Run], lasted: float, prompts: list[str], expected: dict[str, str]) -> Run:
    good = [run for run in answers if run["status"] == 200]
    seconds, first = [run["seconds"] for run in good], [run["first"] for run in good if "first" in run]
    if len(seconds) < 2 or not first:
        raise RuntimeError(f"{len(seconds)} of {len(prompts)} questions were answered; too few for figures")
    return {
        "mean s": fmean(seconds),
        "median s": quantiles(seconds, n=20)[9],
        "95 % s": quantiles(seconds, n=20)[18],
        "first token, mean s": fmean(first),
        "requests/s": len(good) / lasted,
        "tokens/s": sum(run["tokens"] for run in good) / lasted,
        "failed": len(answers) - len(good),
        "lost": len(prompts) - len(answers),
        "same text": sum(run["text"] == expected.get(run["prompt"]) for run in good),
    }


def serve(command: str, prompts: list[str], rate: float, options: argparse.Namespace) -> tuple[list[Run], float]:
    """Start a server and send it the prompts."""
    url = f"http://127.0.0.1:{options.port}"
    if is_healthy(url):
        raise RuntimeError(f"another server listens at {url}")
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(shlex.split(command), stdout=log, stderr=log)
        try:
            while not is_healthy(url):
                if server.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"{command} ended: {log.read()[-2000:]}")
                time.sleep(0.5)
            body = {"model": fetch(f"{url}/v1/models")["data"][0]["id"], "temperature": 0}
            question = {"messages": [{"role": "user", "content": "Count to 20."}], "max_tokens": 32}
            fetch(f"{url}/v1/chat/completions", body | question)  # warms up
            body |= {"max_tokens": options.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
            return send(prompts, body, url, rate, options.seed)
        finally:
            server.terminate()
            server.wait()


def is_healthy(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except OSError:
        return False


def fetch(url: str, body: Run | None = None) -> Any:
    data = json.dumps(body).encode() if body else None
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})))


def send(prompts: list[str], body: Run, url: str, rate: float, seed: int) -> tuple[list[Run], float]:
    """Let readers arrive at random times, `rate` a second; 0: a closed loop."""
    Reader.host, Reader.body, Reader.once = url, body, rate > 0
    Reader.prompts, Reader.runs = prompts[::-1], []
    runner = Environment(user_classes=[Reader]).create_local_runner()
    arrivals = random.Random(seed)
    begun = time.perf_counter()
    for _ in range(len(prompts) if rate else STREAMS):
        runner.spawn_users({Reader.__name__: 1})
        gevent.sleep(arrivals.expovariate(rate) if rate else 0)
    runner.user_greenlets.join()
    lasted = time.perf_counter() - begun
    runner.quit()
    return Reader.runs, lasted


if __name__ == "__main__":
    main()
