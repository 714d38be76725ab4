"""Measure a P-EAGLE drafter against plain decoding: `python evaluate_peagle.py`.

Every prompt is answered both ways in turn, so that a change in the machine's pace meets both. Speeds count decoding
only: from the first new token to the last, without the time that showing text on the terminal takes. What the drafter
does with the prompt falls into its first round, so it counts against the drafter.
"""

import json
import platform
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
import transformers
from tqdm.auto import tqdm
from transformers import AutoModel, HfArgumentParser, TextStreamer
from transformers.generation.streamers import BaseStreamer
from transformers.hf_argparser import HfArg

from data.prompts import load_prompts
from generation_peagle import DecodingStats
from target_peagle import load_target


ROOT = Path(__file__).resolve().parent
HEADING = f"\n{'':18}  prompt    new  plain/s  drafted/s  speed-up    tau  saved  same   kept at depth 1, 2, ..."
ROW = (
    "{name:18.18}{prompt_tokens:>8}{drafted_tokens:>7}{plain_tokens_per_second:>9}{drafted_tokens_per_second:>11}"
    "{speed_up:>10}{tau:>7}{forwards_saved:>7}{identical:>6}  {joint}"
)
SUMMARY = """
{speed_up:.2f}x: {verdict} plain decoding on this machine (95% interval {low:.2f} to {high:.2f})
tau {tau:.2f} ({least:.2f} to {most:.2f}); it breaks even at {break_even_tau:.2f},
  ({verify_ms:.1f} verification + {draft_ms:.1f} drafter + {host_ms:.1f} {rest}) ms a round / {plain_ms:.1f} a token
a round takes {round_ms:.1f} ms: {verify_share:.0%} verification, {draft_share:.0%} drafter, {host_share:.0%} {rest}
kept at depth 1, 2, ...: {joint} jointly, {conditional} where all before were kept"""


@dataclass
class EvaluationArguments:
    drafter: str = HfArg(default=str(ROOT), help="Folder or Hub id of the drafter.")
    target: str | None = HfArg(default=None, help="Folder or Hub id of the target; SmolLM2-135M-Instruct if unset.")
    prompts: str = HfArg(default=str(ROOT / "data/prompts.jsonl"), help="JSON Lines: messages, prompt or turns each.")
    held_out_file: str | None = HfArg(default=None, help="In place of --prompts: what train_peagle.py held out of it.")
    num_prompts: int | None = HfArg(default=None, help="Use the first so many prompts; all if unset.")
    per_category: int | None = HfArg(default=None, help="Use the first so many of each category; all if unset.")
    max_new_tokens: int = HfArg(default=128, help="Longest answer, in tokens.")
    speculation_depth: int | None = HfArg(default=None, help="Draft tokens per round (K); the drafter's own if unset.")
    temperature: float = HfArg(default=0.0, help="0 is greedy; above 0, both ways sample with the same seed.")
    seed: int = HfArg(default=0, help="Seed of the first answer to each prompt; repeats count up from it.")
    repeats: int = HfArg(default=1, help="How often each prompt is answered both ways.")
    output: str | None = HfArg(default=None, help="JSON file for all numbers, settings and versions.")
    quiet: bool = HfArg(default=False, help="Show a progress bar in place of the text.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = HfArg(default=None, help="Float32 on a CPU if unset.")


class Stopwatch(BaseStreamer):
    """Clocks one `generate` call: `seconds` from its first new token to its end, less what `show` took."""

    def __init__(self, show: TextStreamer | None):
        self.show, self.calls, self.shown = show, 0, 0.0

    def put(self, value):
        now, self.calls = time.perf_counter(), self.calls + 1
        if self.calls == 2:  # the first call brings the prompt
            self.first = now
        if self.calls > 1 and self.show is not None:
            self.show.put(value)
            self.shown += time.perf_counter() - now

    def end(self):
        self.seconds = time.perf_counter() - self.first - self.shown
        if self.show is not None:
            self.show.end()


def answer_both_ways(target, drafter, input_ids, depth, seed, plain_first, show=None, **options) -> dict:
    """Answer `input_ids` (list[int]) plainly and with `depth` draft tokens per round; `show` gets the drafted text.

    Returns `prompt_tokens`, the new tokens (list[int]) `plain` and `drafted`, their `_seconds`, and `stats`.
    """
    prompt = torch.tensor([input_ids], device=target.device)
    options |= {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True}
    drafting, run = {"assistant_model": drafter, "num_assistant_tokens": depth}, {"prompt_tokens": len(input_ids)}
    for way in ("plain", "drafted") if plain_first else ("drafted", "plain"):
        watch = Stopwatch(show if way == "drafted" else None)
        torch.manual_seed(seed)
        output = target.generate(prompt, streamer=watch, **options, **(drafting if way == "drafted" else {}))
        tokens, stats = output.sequences[0, len(input_ids) :].tolist(), output.get("stats", run.get("stats"))
        run |= {way: tokens, f"{way}_seconds": watch.seconds, "stats": stats}
    return run


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def summarize(runs: list[dict], depth: int) -> dict:
    """Sums over runs and the ratios of these sums; a ratio without a denominator is None.

    `plain_ms` and `drafted_ms` are milliseconds per token, the other `_ms` per round, and `_share` their part of it.
    `joint[d]` is the share of the draft tokens at depth d that were kept; `conditional[d]` is their share among those
    judged: all before them were kept and no stop came first.
    """
    total, stats = {"answers": len(runs), "prompt_tokens": sum(run["prompt_tokens"] for run in runs)}, DecodingStats()
    for run in runs:
        for name, value in vars(run["stats"]).items():
            setattr(stats, name, getattr(stats, name) + value)
    for way in ("plain", "drafted"):
        tokens, seconds = sum(len(run[way]) for run in runs), sum(run[f"{way}_seconds"] for run in runs)
        # The first token of an answer comes from the prefill, before the clock starts.
        milliseconds = ratio(1000 * seconds, tokens - len(runs))
        total |= {f"{way}_tokens": tokens, f"{way}_seconds": seconds, f"{way}_ms": milliseconds}
        total[f"{way}_tokens_per_second"] = ratio(1000, milliseconds)
    rounds, emitted = len(stats.emitted), sum(stats.emitted)
    spent = {"draft": stats.draft_seconds, "verify": stats.verify_seconds}
    spent["host"] = total["drafted_seconds"] - sum(spent.values())
    counts = [stats.depth_counts(d) for d in range(depth)]
    judged = [sum(n > d and e > d for n, e in zip(stats.drafted, stats.emitted)) for d in range(depth)]
    total |= {"speed_up": ratio(total["plain_ms"], total["drafted_ms"]), "rounds": rounds, "emitted": emitted}
    total |= {"tau": ratio(emitted, rounds), "joint": [ratio(*count) for count in counts]}
    total["conditional"] = [ratio(kept, asked) for (kept, _), asked in zip(counts, judged)]
    total["forwards_saved"] = total["plain_tokens"] - len(runs) - rounds
    total |= {f"{name}_ms": ratio(1000 * seconds, rounds) for name, seconds in spent.items()}
    total |= {f"{name}_share": ratio(seconds, total["drafted_seconds"]) for name, seconds in spent.items()}
    total["round_ms"] = ratio(1000 * total["drafted_seconds"], rounds)
    total["break_even_tau"] = ratio(total["round_ms"], total["plain_ms"])
    return total | {"identical": all(run["plain"] == run["drafted"] for run in runs)}


def bootstrap(rows: list[dict], samples: int = 2000) -> dict:
    """95% intervals `[low, high]` of the total `tau` and `speed_up`, drawing whole prompts with replacement."""
    names = ("answers", "emitted", "rounds", "plain_tokens", "plain_seconds", "drafted_tokens", "drafted_seconds")
    table = np.array([[row[name] for name in names] for row in rows if row["rounds"]])
    picks = np.random.default_rng(0).integers(len(table), size=(samples, len(table)))
    answers, emitted, rounds, plain, plain_s, drafted, drafted_s = table[picks].sum(axis=1).T
    draws = {"tau": emitted / rounds, "speed_up": (drafted - answers) / drafted_s * plain_s / (plain - answers)}
    return {name: np.quantile(values, [0.025, 0.975]).tolist() for name, values in draws.items()}


def environment(target) -> dict:
    """Versions, machine and models; `load_of_others` is what other programs have asked of late, in cores."""
    # Where there is no such file, or it names no model, Python's own word has to do.
    cpu = re.findall(r"model name\s*: (.+)", "".join(file.read_text() for file in Path("/proc").glob("cpuinfo")))
    git = subprocess.run("git describe --always --dirty", shell=True, cwd=ROOT, capture_output=True, text=True)
    # A second of our own CPU time within the last minute adds about 1/60 to the one-minute load average.
    own, cores = min(time.process_time() / 60, torch.get_num_threads()), psutil.cpu_count()
    others = max(0.0, psutil.getloadavg()[0] - own)
    warning = f"WARNING: other programs keep {others:.1f} of {cores} cores busy, do not trust the timings."
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "git": git.stdout.strip() or None,
        "cpu": cpu[0] if cpu else platform.processor(),
        "gpu": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "cores": cores,
        "load_of_others": others,
        "load_warning": warning if others > 0.5 * cores else None,
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def evaluate(target, tokenizer, drafter, prompts: list[dict], args: EvaluationArguments | None = None) -> dict:
    """Answer the `prompts` of `read_prompts` plainly and drafted. The paths in `args` are not read here.

    Returns numbers and strings only: `settings`, `environment`, `prompts` and `categories` (a [`summarize`] each), and
    `total`, which has `intervals` from [`bootstrap`] as well.
    """
    args, runs = args or EvaluationArguments(), []
    depth = args.speculation_depth or drafter.config.speculation_depth
    used = {"drafter": drafter.name_or_path, "target": target.name_or_path, "speculation_depth": depth}
    sampling = {"temperature": args.temperature, "top_k": 0, "top_p": 1.0} if args.temperature else {}
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": bool(sampling)} | sampling
    machine = environment(target)
    if machine["load_warning"]:
        print(machine["load_warning"])
    with drafter.attach(target, tokenizer):
        # Warm up.
        answer_both_ways(target, drafter, prompts[0]["input_ids"], depth, 0, True, **options | {"max_new_tokens": 16})
        for i, prompt in enumerate(tqdm(prompts, unit=" prompts", disable=not args.quiet)):
            if not args.quiet:
                print(f"\n[{i + 1}/{len(prompts)}] {prompt['id']}")
            for repeat in range(args.repeats):
                show = TextStreamer(tokenizer, skip_special_tokens=True) if repeat == 0 and not args.quiet else None
                order = {"seed": args.seed + repeat, "plain_first": (i + repeat) % 2 == 0, "show": show}
                run = answer_both_ways(target, drafter, prompt["input_ids"], depth, **order, **options)
                runs.append(run | {"prompt": i, "category": prompt["category"]})

    def part(key, value):
        return summarize([run for run in runs if run[key] == value], depth)

    rows = [{"id": p["id"], "category": p["category"]} | part("prompt", i) for i, p in enumerate(prompts)]
    categories = {name: part("category", name) for name in dict.fromkeys(row["category"] for row in rows)}
    total = summarize(runs, depth) | {"intervals": bootstrap(rows) if any(row["rounds"] for row in rows) else None}
    # Elsewhere than in greedy float32, rounding may decide a near tie differently.
    broken = not (total["identical"] or args.temperature) and machine["dtype"] == "float32"
    report = {"settings": asdict(args) | used, "environment": machine, "prompts": rows, "categories": categories}
    return report | {"total": total, "promise_broken": broken}


def print_table(report: dict):
    """Print what [`evaluate`] returned. Counts are sums over the repeats; `saved` are forwards of the target."""
    total, machine = report["total"], report["environment"]

    def cells(row):
        texts = {key: "-" if v is None else f"{v:.2f}" if isinstance(v, float) else v for key, v in row.items()}
        for key in ("joint", "conditional"):
            texts[key] = "".join(f"{'-' if share is None else f'{share:.0%}':>5}" for share in row[key])
        return texts | {"identical": "yes" if row["identical"] else "NO"}

    print(HEADING)
    rows = [(row["id"], row) for row in report["prompts"]]
    rows += [(f"all {name}", row) for name, row in report["categories"].items()]
    for name, row in [*rows, ("total", total)]:
        print(ROW.format(name=name, **cells(row)))
    if total["speed_up"] is not None:
        (low, high), (least, most) = (total["intervals"][name] for name in ("speed_up", "tau"))
        words = {key: cells(total)[key] for key in ("joint", "conditional")}
        words["verdict"] = "faster than" if low > 1 else "slower than" if high < 1 else "no clear difference from"
        # A GPU works on after the call that starts a forward, and the wait for its result falls outside.
        words["rest"] = "Python and waiting for the GPU" if machine["gpu"] else "Python"
        print(SUMMARY.format(low=low, high=high, least=least, most=most, **total | words))
    if machine["load_warning"]:
        print(machine["load_warning"])
    if not total["identical"]:
        names = ", ".join(row["id"] for row in report["prompts"] if not row["identical"])
        cause = "THIS IS A BUG." if report["promise_broken"] else "Rounding may do that, but not in greedy float32."
        print(f"!!! DRAFTED AND PLAIN ANSWERS DIFFER for {names}. {cause}")


def main(argv: list[str] | None = None) -> int:
    (args,) = HfArgumentParser(EvaluationArguments).parse_args_into_dataclasses(argv)
    if Path(args.drafter).is_dir() and not Path(args.drafter, "config.json").is_file():
        raise FileNotFoundError(f"There is no drafter in {args.drafter}: train one, or name one with --drafter.")
    if args.output:
        Path(args.output).touch()  # what cannot be written should fail before the measurement
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    drafter = AutoModel.from_pretrained(args.drafter, trust_remote_code=True, dtype=target.dtype).to(target.device)
    prompts = load_prompts(args.prompts, args.held_out_file, tokenizer, target, args.num_prompts, args.per_category)
    report = evaluate(target, tokenizer, drafter, prompts, args)
    print_table(report)
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n")
    return int(report["promise_broken"])


if __name__ == "__main__":
    sys.exit(main())
