"""Requests that arrive at random: the time to the first token, the time a request takes, and tokens per second.

    python -m docs.measure.time_requests --questions spec_bench_dev.jsonl [--methods none,auto] [--loads 25,50,100,150]
        [--repeats 3]

Arrivals are a Poisson process. A load of 100 % is the rate at which plain decoding with all rows full answers the same
questions; "all" lets all arrive at once. Each load has the same arrivals for every method; the methods take turns.
Figures are medians over the repeats.
`--turns` times the first token of second turns instead, with and without the beginning that the engine has kept.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from decode import Engine, Request, Target
from draftless_commands.benchmark.files import find_commit
from draftless_commands.shared.results import COLOURS, save_figure
from proposers import load_proposer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--methods", default="none,auto")
    parser.add_argument("--loads", default="all,25,50,100,150")
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    lines = options.questions.read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["turns"] for line in lines]
    target = Target.load()
    target.warm_up(options.rows)
    if options.turns:
        several = [turns for turns in questions if len(turns) > 1][: options.limit]
        rows = [time_turns(target, several, options.max_new_tokens)]
        print(json.dumps(rows[0]))
    else:
        rows = time_arrivals(target, questions, options)
    if options.json:
        settings = {name: str(value) for name, value in vars(options).items()} | {"commit": find_commit()}
        options.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        draw(rows, options.plot)


def time_arrivals(target: Target, questions: list[list[str]], options: argparse.Namespace) -> list[dict[str, Any]]:
    chosen = [turns[0] for turns in questions[:: max(1, len(questions) // options.limit)][: options.limit]]
    names, rows = options.methods.split(","), list[dict[str, Any]]()
    settings = {"rows": options.rows, "kept_bytes": 0}  # the same questions are asked again
    engines = {name: Engine(target, load_proposer(name, target), **settings) for name in names}
    for engine in engines.values():  # the first passes are slow
        ask(engine, chosen[: options.rows], [0.0] * options.rows, options.max_new_tokens)
    rate = 0.0  # requests a second
    for number, load in enumerate(options.loads.split(",")):
        choose, now, arrivals = random.Random(number), 0.0, list[float]()
        for _ in chosen:
            arrivals.append(now)
            now += 0.0 if load == "all" else choose.expovariate(rate * float(load) / 100)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for repeat in range(options.repeats):
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                found[name].append(ask(engines[name], chosen, arrivals, options.max_new_tokens))
        for name, runs in found.items():
            figures = {figure: round(statistics.median(run[figure] for run in runs), 3) for figure in runs[0]}
            rate = rate or len(chosen) / figures["seconds"]
            rows.append({"load": load, "method": name, **figures})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """The median time that a request takes and the tokens per second, by load and method."""
    panels = (("whole_median", "median seconds of a request"), ("tokens_per_second", "tokens per second"))
    with save_figure(file, 9, 3.6, 11) as figure:
        for axes, (name, label) in zip(figure.subplots(1, 2), panels, strict=True):
            for colour, method in zip(COLOURS, dict.fromkeys(row["method"] for row in rows), strict=False):
                own = [row for row in rows if row["method"] == method and row["load"] != "all"]
                axes.plot(
                    [row["load"] + " %" for row in own], [row[name] for row in own], "o-", color=colour, label=method
                )
            axes.set(xlabel="load: share of what plain decoding can answer", ylabel=label, ylim=(0, None))
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)


def ask(engine: Engine, prompts: list[str], arrivals: list[float], max_new_tokens: int) -> dict[str, float]:
    """Medians and 99th percentiles in seconds, and tokens per second from the first arrival to the last token."""
    begun, running = perf_counter(), dict[int, tuple[Request, float]]()
    first, whole, tokens, gaps = list[float](), list[float](), 0, list[float]()
    last: dict[int, float] = {}
    waiting = list(zip(arrivals, prompts, strict=True))
    while waiting or running:
        now = perf_counter() - begun
        while waiting and waiting[0][0] <= now:
            arrival, prompt = waiting.pop(0)
            request = engine.add(prompt, max_new_tokens=max_new_tokens, text=False)
            running[request.request_id] = request, arrival
        if not running:
            sleep(waiting[0][0] - now)
            continue
        for chunk in engine.step():
            now, (request, arrival) = perf_counter() - begun, running[chunk.request_id]
            if request.stats.steps == 1:
                first.append(now - arrival)
            else:
                gaps.append(now - last[chunk.request_id])
            last[chunk.request_id] = now
            tokens += len(chunk.tokens)
            if chunk.answer is not None:
                whole.append(now - arrival)
                del running[chunk.request_id]
    seconds = perf_counter() - begun
    figures: dict[str, float] = {"seconds": seconds, "tokens_per_second": tokens / seconds, "longest_gap": max(gaps)}
    for name, values in (("first", first), ("whole", whole)):
        figures |= {f"{name}_median": statistics.median(values), f"{name}_99": statistics.quantiles(values, n=100)[98]}
    return figures


def time_turns(target: Target, questions: list[list[str]], max_new_tokens: int) -> dict[str, Any]:
    """Seconds to the first token of second turns: with the beginning that is kept, and read again."""
    engines = [Engine(target, "auto", rows=1), Engine(target, "auto", rows=1, kept_bytes=0)]
    times: list[tuple[float, float]] = []
    reused = 0
    for first, second, *_ in questions:
        pair = []
        for engine in engines:
            chat = [{"role": "user", "content": first}]
            request = engine.add(chat, max_new_tokens=max_new_tokens)
            list(request)
            assert request.answer is not None
            chat += [{"role": "assistant", "content": request.answer.text}, {"role": "user", "content": second}]
            begun = perf_counter()
            request = engine.add(chat, max_new_tokens=2)
            next(iter(request))
            pair.append(perf_counter() - begun)
            list(request)
            reused += request.stats.reused
        times.append((pair[0], pair[1]))
    ratios = sorted(kept / again for kept, again in times)
    choose = random.Random(0)
    medians = sorted(statistics.median(choose.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "questions": len(times),
        "kept": statistics.median(kept for kept, _ in times),
        "again": statistics.median(again for _, again in times),
        "ratio": statistics.median(ratios),
        "interval": [medians[50], medians[-51]],
        "reused_tokens": reused / len(times),
    }


if __name__ == "__main__":
    main()
