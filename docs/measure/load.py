"""Draftless and other servers under load: latency and throughput at Poisson arrivals, with and without drafts.

    python -m docs.measure.load --questions spec_bench_dev.jsonl --aiperf PROGRAM --tokenizer DIR

The client is NVIDIA's AIPerf, installed in an environment of its own. A closed loop of 8 requests at a time finds the
rate that the server "none" sustains. Then each server answers the same prompts, greedily, at the same random times, at
shares of that rate. Each run starts its server: an older one has the prompts in its cache and drafts from their
answers. Above 100 % the queue grows to the end. Draftless needs --queue REQUESTS there: its default may refuse some
with status 429. Idle machines only.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PLAIN = "none"
AIPERF = """--endpoint-type chat --streaming --use-server-token-count --custom-dataset-type single_turn --workers-max 1
--dataset-sampling-strategy sequential --export-outputs-json --no-gpu-telemetry --no-server-metrics"""
FIGURES = {  # by column: AIPerf's name; "first" is the time to the first token
    **{f"{kind}_ms": ("request_latency", kind) for kind in ("avg", "p50", "p95")},
    **{f"first_{kind}_ms": ("time_to_first_token", kind) for kind in ("avg", "p50", "p95")},
    "tokens_per_s": ("output_token_throughput", "avg"),
    "requests_per_s": ("request_throughput", "avg"),
    "client_late_p95_ms": ("credit_to_start_latency", "p95"),
}
Run = dict[str, Any]
Answers = dict[str, str]  # by AIPerf's name of the prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--questions", type=Path, required=True, metavar="FILE", help="JSON lines with turns")
    parser.add_argument("--aiperf", default="aiperf", metavar="PROGRAM")
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="AIPerf loads one, but servers count tokens")
    parser.add_argument("--server", action="append", metavar="NAME=COMMAND", help="default: Draftless as none and auto")
    parser.add_argument("--loads", default="25,50,100,150", help="percent of the rate")
    parser.add_argument("--rate", type=float, help="100 %%, in requests per second; default: what none sustains")
    parser.add_argument("--requests", type=int, default=200, help="per run, each with a question of its own")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8431, help="where the servers listen")
    options = parser.parse_args()
    serve = f"{sys.executable} -m draftless serve --port {options.port} --queue {options.requests} --proposer"
    servers = dict(each.split("=", 1) for each in options.server or [f"{PLAIN}={serve} none", f"auto={serve} auto"])
    questions = [json.loads(line)["turns"][0] for line in options.questions.read_text(encoding="utf-8").splitlines()]
    prompts = random.Random(options.seed).sample(questions, options.requests)
    rate, expected = options.rate, Answers()
    runs: list[Run] = []
    for load in [0] * (rate is None) + [int(load) for load in options.loads.split(",")]:
        for name in servers if load else [PLAIN]:
            poisson = {"arrival-pattern": "poisson", "request-rate": (rate or 0) * load / 100}
            run, answers = measure(servers[name], prompts, poisson if load else {"concurrency": 8}, options)
            rate, expected = rate or run["requests_per_s"], expected or answers
            same = sum(text == expected.get(key) for key, text in answers.items())  # as in the first run
            runs.append({"server": name, "load": load, **run, "same": same, "rate": rate})
            print(json.dumps(runs[-1]), flush=True)
    print_table(f"100 %: {rate:.3f} requests per second; 0 %: closed loop.", runs, [*FIGURES, "failed", "lost", "same"])
    plain = {run["load"]: run for run in runs if run["server"] == PLAIN}
    others = [run for run in runs if run["server"] != PLAIN and run["load"] in plain]
    ratios = [run | {name: run[name] / plain[run["load"]][name] for name in FIGURES} for run in others]
    print_table(f"Ratios to {PLAIN}:", ratios, list(FIGURES)[:7])


def print_table(title: str, runs: list[Run], columns: list[str]) -> None:
    print(f"\n{title}\n\n| load | server | {' | '.join(columns)} |\n|---:|---|{'---:|' * len(columns)}")
    for run in runs:
        print(f"| {run['load']} % | {run['server']} | {' | '.join(f'{run[name]:.5g}' for name in columns)} |")


def measure(command: str, prompts: list[str], pattern: Run, options: argparse.Namespace) -> tuple[Run, Answers]:
    """Start a server and let AIPerf send it the prompts."""
    url = f"http://127.0.0.1:{options.port}"
    if is_healthy(url):
        raise RuntimeError(f"another server listens at {url}")
    with TemporaryDirectory() as name, (Path(name) / "server.log").open("w") as log:
        server = subprocess.Popen(shlex.split(command), stdout=log, stderr=log)
        try:
            while not is_healthy(url):
                if server.poll() is not None:
                    raise RuntimeError(f"{command} ended: {Path(log.name).read_text()[-2000:]}")
                time.sleep(0.5)
            model = ask(f"{url}/v1/models")["data"][0]["id"]
            question = {"model": model, "messages": [{"role": "user", "content": "Count to 20."}], "max_tokens": 32}
            ask(f"{url}/v1/chat/completions", question)  # warms up
            return send(prompts, {"url": url, "model": model, **pattern}, Path(name), options)
        finally:
            server.terminate()
            server.wait()


def is_healthy(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except OSError:
        return False


def ask(url: str, body: Run | None = None) -> Any:
    data = json.dumps(body).encode() if body else None
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})))


def send(prompts: list[str], settings: Run, folder: Path, options: argparse.Namespace) -> tuple[Run, Answers]:
    """Run AIPerf and read its files."""
    lines = [json.dumps({"text": prompt}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    settings |= {"input-file": folder / "prompts.jsonl", "request-count": len(prompts), "random-seed": options.seed}
    settings |= {"extra-inputs": json.dumps({"temperature": 0, "max_tokens": options.max_tokens})}
    settings |= {"tokenizer": options.tokenizer, "output-artifact-dir": folder}
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    subprocess.run([options.aiperf, "profile", *AIPERF.split(), *words], check=True, stdout=subprocess.DEVNULL)
    found = json.loads((folder / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    run = {column: found[name][kind] for column, (name, kind) in FIGURES.items()}
    run |= {"requests": len(prompts), "failed": sum(each["count"] for each in found["error_summary"])}
    run |= {"lost": len(prompts) - run["failed"] - int(found["request_count"]["avg"])}
    outputs = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))["data"]
    return run, {output["conversation_id"]: output["response_text"] for output in outputs}


if __name__ == "__main__":
    main()
