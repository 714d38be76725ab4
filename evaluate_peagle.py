"""Measure a P-EAGLE drafter against plain decoding: `python evaluate_peagle.py`.

Every prompt is answered both ways in turn, so that a change in the machine's pace meets both. Speeds count decoding
only: from the first new token to the last, without the time that showing text on the terminal takes. What the drafter
does with the prompt falls into its first round, so it counts against the drafter.

In float32 on a CPU both ways have prepacked linear layers, as stock ones make verification dear (prepack_peagle.py).
Plain decoding with stock layers is then measured as well.

In bfloat16 and float16 a forward over several tokens rounds otherwise than one over a single token, so greedy answers may part
at a near tie of the target's scores. Where they part, the report says how near.
"""

import json
import math
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, HfArgumentParser, TextStreamer
from transformers.generation.streamers import BaseStreamer
from transformers.hf_argparser import HfArg

from data.prompts import EVAL_FRACTION, load_prompts
from decoding_peagle import DecodingStats
from environment_peagle import environment
from inference_peagle import load_drafter
from prepack_peagle import prepack
from sizing_peagle import costs_of
from target_peagle import load_target


ROOT = Path(__file__).resolve().parent
SHOWN = 600  # characters of the prompt, from its end
FEW = 3  # prompts below which no verdict is given
# Scores this near are a tie, in units of what the dtype can tell apart at the largest one. Reading a text in one forward or
# token by token moved the difference of two by up to 1.8 on small random targets of three families and 1.5 on SmolLM2.
NEAR_TIE = 4
WAYS, SPEED_UPS = ("stock", "plain", "drafted"), {"speed_up": "plain", "speed_up_over_stock": "stock"}
HEADING = "\n{name:18} prompt   new{stock} plain/s drafted/s speed-up   tau saved same  kept at depth 1, 2, ..."
ROW = (
    "{name:18.18}{prompt_tokens:>7}{drafted_tokens:>6}{stock}{plain_tokens_per_second:>8}"
    "{drafted_tokens_per_second:>10}{speed_up:>9}{tau:>6}{forwards_saved:>6}{identical:>5} {joint}"
)
SUMMARY = """
{speed_up:.2f}x: {verdict} {prepacked}plain decoding on this machine (95% interval {low:.2f} to {high:.2f})
tau {tau:.2f} ({least:.2f} to {most:.2f}); drafting pays above tau {break_even_tau:.2f}{inequality}
a round takes {round_ms:.1f} ms: {verify_share:.0%} verification, {draft_share:.0%} drafter, {host_share:.0%} {rest}
one drafter forward: {slots_ms:.1f} ms for {depth} slots, {slots_ratio:.2f}x of one slot, \
{step_ratio:.2f} of a plain target step
kept at depth 1, 2, ...: {joint} jointly, {conditional} where all before were kept"""
INEQUALITY = """
  in the {drafting_rounds} of {rounds} rounds that drafted: tau {drafting_tau:.2f} {sign} {drafting_break_even_tau:.2f} =
  ({drafting_verify_ms:.1f} verification + {drafting_draft_ms:.1f} drafter + {host_ms:.1f} {rest}) / {plain_ms:.1f} ms \
of a plain token"""
STOCK = """\
{speed_up_over_stock:.2f}x over stock plain decoding ({low:.2f} to {high:.2f}), which takes {stock_ms:.1f} ms a token;
  {same_as_stock} of its {answers} answers are the same (rounding decides near ties); packing took {megabytes:.0f} MB"""

PARTING = {  # by whether it is a near tie
    True: "{name}: they part at new token {position} (from 0), a near tie: the target's scores of the two are {gap:.3g} apart",
    False: "{name}: they part at new token {position} (from 0), NO near tie: the target's scores of the two are {gap} apart",
}


@dataclass
class EvaluationArguments:
    drafter: str = HfArg(default=str(ROOT), help="Folder or Hub id of the drafter.")
    target: str | None = HfArg(default=None, help="Folder or Hub id of the target; SmolLM2-135M-Instruct if unset.")
    prompts: str = HfArg(default=str(ROOT / "data/prompts.jsonl"), help="JSON Lines: messages, prompt or turns each.")
    held_out_file: str | None = HfArg(default=None, help="In place of --prompts: what train_peagle.py held out of it.")
    eval_fraction: float = HfArg(default=EVAL_FRACTION, help="The share of --held_out_file that training held out.")
    num_prompts: int | None = HfArg(default=None, help="Use the first so many prompts; all if unset.")
    per_category: int | None = HfArg(default=None, help="Use the first so many of each category; all if unset.")
    max_new_tokens: int = HfArg(default=128, help="Longest answer, in tokens.")
    speculation_depth: int | None = HfArg(
        default=None, help="Draft tokens per round (K), or along a path of a tree; the drafter's own if unset."
    )
    draft_tree: str | None = HfArg(
        default=None,
        help="Draft so many tokens per round as a tree, or with `auto` as many as pay; a chain of K if unset.",
    )
    prompt_lookup: int | None = HfArg(
        default=None, help="Also draft up to so many tokens that followed the newest ones before."
    )
    temperature: float = HfArg(default=0.0, help="0 is greedy; above 0 both ways sample, trees by the same draws.")
    seed: int = HfArg(default=0, help="Seed of the first answer to each prompt; repeats count up from it.")
    repeats: int = HfArg(default=1, help="How often each prompt is answered both ways.")
    output: str | None = HfArg(default=None, help="JSON file for all numbers, settings and versions.")
    quiet: bool = HfArg(default=False, help="Show a progress bar in place of the text.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = HfArg(default=None, help="Float32 on a CPU if unset.")
    prepack: bool | None = HfArg(default=None, help="Prepack the linear layers; yes in float32 on a CPU if unset.")

    def __post_init__(self):
        if self.draft_tree not in (None, "auto"):
            if not str(self.draft_tree).isdecimal():
                raise ValueError(f"--draft_tree is {self.draft_tree!r}: give a number of draft tokens, or auto.")
            self.draft_tree = int(self.draft_tree)


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


def answer_both_ways(
    target, drafter, input_ids, depth, seed, plain_first, show=None, prepacked=None, shape=None, **options
):
    """Answer `input_ids` (list[int]) plainly and with drafts `depth` deep; `show` gets the drafted text.

    `shape` has further arguments of the drafted way. With the [`Prepacked`] of the target, also plainly with stock layers. Returns a dict: `prompt_tokens`, the new
    tokens (list[int]) `plain`, `drafted` and perhaps `stock`, their `_seconds`, and `stats`.
    """
    prompt = torch.tensor([input_ids], device=target.device)
    options |= {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True}
    drafting, run = {"assistant_model": drafter, "num_assistant_tokens": depth}, {"prompt_tokens": len(input_ids)}
    drafting |= shape or {}
    ways = WAYS if prepacked else WAYS[1:]
    for way in ways if plain_first else reversed(ways):
        watch = Stopwatch(show if way == "drafted" else None)
        torch.manual_seed(seed)
        with prepacked.paused() if way == "stock" else nullcontext():
            output = target.generate(prompt, streamer=watch, **options, **(drafting if way == "drafted" else {}))
        tokens, stats = output.sequences[0, len(input_ids) :].tolist(), output.get("stats", run.get("stats"))
        run |= {way: tokens, f"{way}_seconds": watch.seconds, "stats": stats}
    return run


def parting(target, input_ids: list[int], plain: list[int], drafted: list[int]) -> dict:
    """Where two greedy answers part, and how near a tie is there, by one fresh forward over what they have in common.

    `position` is that in the answer, from 0. `gap` is by how much the target scores the plain token above the drafted one,
    None where no gap can explain it: an answer just ends, or the settings rule the token out. `near_tie`: rounding explains it.
    """
    position = next((i for i, (one, other) in enumerate(zip(plain, drafted)) if one != other), None)
    if position is None:
        return {"position": min(len(plain), len(drafted)), "gap": None, "near_tie": False}
    prompt = torch.tensor([input_ids + plain[:position]], device=target.device)
    options = {"do_sample": False, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
    scores = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options).scores[0][0].float()
    gap = (scores[plain[position]] - scores[drafted[position]]).abs().item()
    unit = torch.finfo(target.dtype).eps * scores[scores.isfinite()].abs().max().item()
    return {"position": position, "gap": gap if gap < math.inf else None, "near_tie": gap <= NEAR_TIE * unit}


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def summarize(runs: list[dict], depth: int) -> dict:
    """Sums over runs and the ratios of these sums; a ratio without a denominator is None.

    `stock_ms`, `plain_ms`, `drafted_ms` are milliseconds per token, the other `_ms` per round, and `_share` their part
    of it; `drafting_` is of the rounds that drafted alone, which with `auto` are not all. Where plain decoding with stock layers was measured, `same_as_stock` counts its answers that equal `plain`.
    `joint[d]` is the share of the draft tokens at depth d that were kept; `conditional[d]` is their share among those
    judged: all before them were kept and no stop came first.
    """
    total = {"answers": len(runs), "prompt_tokens": sum(run["prompt_tokens"] for run in runs)}
    stats = sum((run["stats"] for run in runs), DecodingStats())
    ways = [way for way in WAYS if way in runs[0]]
    for way in ways:
        tokens, seconds = sum(len(run[way]) for run in runs), sum(run[f"{way}_seconds"] for run in runs)
        # The first token of an answer comes from the prefill, before the clock starts.
        milliseconds = ratio(1000 * seconds, tokens - len(runs))
        total |= {f"{way}_tokens": tokens, f"{way}_seconds": seconds, f"{way}_ms": milliseconds}
        total[f"{way}_tokens_per_second"] = ratio(1000, milliseconds)
    rounds, emitted = len(stats.emitted), sum(stats.emitted)
    spent = {"draft": stats.draft_seconds, "verify": stats.verify_seconds}
    spent["host"] = total["drafted_seconds"] - sum(spent.values())
    counts = [stats.depth_counts(d) for d in range(depth)]
    total |= {name: ratio(total[f"{way}_ms"], total["drafted_ms"]) for name, way in SPEED_UPS.items() if way in ways}
    total |= {"rounds": rounds, "emitted": emitted, "tau": ratio(emitted, rounds)}
    total["joint"] = [ratio(*count) for count in counts]
    total["conditional"] = [ratio(kept, stats.judged(d)) for d, (kept, _) in enumerate(counts)]
    total["forwards_saved"] = total["plain_tokens"] - len(runs) - rounds
    total |= {f"{name}_ms": ratio(1000 * seconds, rounds) for name, seconds in spent.items()}
    total |= {f"{name}_share": ratio(seconds, total["drafted_seconds"]) for name, seconds in spent.items()}
    total["round_ms"] = ratio(1000 * total["drafted_seconds"], rounds)
    total["break_even_tau"] = ratio(total["round_ms"], total["plain_ms"])
    total |= drafting_rounds(stats, total)
    if "stock" in ways:
        total["same_as_stock"] = sum(run["stock"] == run["plain"] for run in runs)
    return total | {"identical": all(run["plain"] == run["drafted"] for run in runs)}


def drafting_rounds(stats: DecodingStats, total: dict) -> dict:
    """What the rounds that drafted gave and took; what is neither forward takes as long as in the other rounds."""
    times = zip(stats.nodes, stats.emitted, stats.draft_times, stats.verify_times)
    rounds = [row for row in times if row[0] or row[2]]
    _, emitted, draft, verify = map(sum, zip(*rounds)) if rounds else (0, 0, 0, 0)
    part = {"drafting_rounds": len(rounds), "drafting_tau": ratio(emitted, len(rounds))}
    for name, seconds in (("draft", draft), ("verify", verify)):
        part[f"drafting_{name}_ms"] = ratio(1000 * seconds, len(rounds))
    needed = sum(part[f"drafting_{name}_ms"] for name in ("draft", "verify")) + total["host_ms"] if rounds else None
    return part | {"drafting_break_even_tau": ratio(needed, total["plain_ms"])}


def bootstrap(rows: list[dict], samples: int = 2000) -> dict:
    """95% intervals `[low, high]` of the total `tau` and speed-ups, drawing whole prompts with replacement."""
    rows = [row for row in rows if row["rounds"]]
    ways = [way for way in WAYS if f"{way}_tokens" in rows[0]]
    names = ["answers", "emitted", "rounds", *(f"{way}_{unit}" for way in ways for unit in ("tokens", "seconds"))]
    picks = np.random.default_rng(0).integers(len(rows), size=(samples, len(rows)))
    sums = {name: np.array([row[name] for row in rows])[picks].sum(axis=1) for name in names}
    pace = {way: sums[f"{way}_seconds"] / (sums[f"{way}_tokens"] - sums["answers"]) for way in ways}
    draws = {name: pace[way] / pace["drafted"] for name, way in SPEED_UPS.items() if way in ways}
    draws["tau"] = sums["emitted"] / sums["rounds"]
    return {name: np.quantile(values, [0.025, 0.975]).tolist() for name, values in draws.items()}


@torch.no_grad()
def time_calls(target, drafter, input_ids, depth) -> dict:
    """Median milliseconds of single calls, in turn, with 200 tokens cached: `one_slot_ms` and `slots_ms` for drafting
    1 and `depth` tokens, `step_ms` for a target forward of one; and the ratios of the second to the other two."""
    tokens = torch.tensor(input_ids, device=target.device).repeat(202)[:202]
    unread, features = tokens.to(drafter.device), torch.ones(1, 200, drafter.config.num_features)
    table = target.get_input_embeddings().weight.to(drafter.device)
    target_cache, cache = target(tokens[None, :200], use_cache=True).cache, DynamicCache()
    drafter.draft(unread[:201], features, 1, cache, table)

    def draft(count):
        logits = drafter.draft(unread[200:], features[:, :1], count, cache, table)
        cache.crop(-1)
        return logits

    calls = (lambda: draft(1), lambda: draft(depth), lambda: target(tokens[None, -1:], cache=target_cache).logits)
    times = np.empty((20, len(calls)))
    for i, j in np.ndindex(times.shape):
        start = time.perf_counter()
        calls[j]().argmax(dim=-1).tolist()  # as in decoding, this waits for the result
        times[i, j] = 1000 * (time.perf_counter() - start)
    one, slots, step = np.median(times, axis=0).tolist()
    times = {"one_slot_ms": one, "slots_ms": slots, "step_ms": step}
    return times | {"slots_ratio": slots / one, "step_ratio": slots / step}


def evaluate(target, tokenizer, drafter, prompts: list[dict], args: EvaluationArguments | None = None) -> dict:
    """Answer the `prompts` of `read_prompts` plainly and drafted. The paths in `args` are not read here.

    Returns numbers and strings only: `settings`, `environment`, `prompts` and `categories` (a [`summarize`] each), and
    `total`, which has `intervals` from [`bootstrap`] and the numbers of [`time_calls`] as well.
    """
    args, runs = args or EvaluationArguments(), []
    config, auto = drafter.config, args.draft_tree == "auto"
    depth = args.speculation_depth or (config.num_depths if auto else config.speculation_depth)
    used = {"drafter": drafter.name_or_path, "target": target.name_or_path, "prompts": args.prompts}
    # What lies in this repository is named from its root: reports are shared, the machine's folders are not.
    used = {key: name.replace(f"{ROOT}/", "") if name != str(ROOT) else "." for key, name in used.items()}
    used["speculation_depth"] = depth
    sampling = {"temperature": args.temperature, "top_k": 0, "top_p": 1.0} if args.temperature else {}
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": bool(sampling)} | sampling
    options["shape"] = {"draft_tree": args.draft_tree, "prompt_lookup_num_tokens": args.prompt_lookup}
    machine = environment(target)
    if machine["load_warning"]:
        print(machine["load_warning"])
    usual = machine["dtype"] == "float32" and target.device.type == "cpu" and torch.backends.mkldnn.is_available()
    used["prepack"] = usual if args.prepack is None else args.prepack
    with ExitStack() as stack:
        stack.enter_context(drafter.attach(target, tokenizer))
        prepacked = [stack.push(prepack(model)) for model in (target, drafter)] if used["prepack"] else []
        machine["prepacked_bytes"] = sum(each.bytes for each in prepacked)
        options["prepacked"] = prepacked[0] if prepacked else None
        # Warm up.
        answer_both_ways(target, drafter, prompts[0]["input_ids"], depth, 0, True, **options | {"max_new_tokens": 16})
        try:
            for i, prompt in enumerate(tqdm(prompts, unit=" prompts", disable=not args.quiet)):
                if not args.quiet:
                    print(
                        f"\n[{i + 1}/{len(prompts)}] {prompt['id']}\n{tokenizer.decode(prompt['input_ids'])[-SHOWN:]}"
                    )
                for repeat in range(args.repeats):
                    show = (
                        TextStreamer(tokenizer, skip_special_tokens=True) if repeat == 0 and not args.quiet else None
                    )
                    order = {"seed": args.seed + repeat, "plain_first": (i + repeat) % 2 == 0, "show": show}
                    run = answer_both_ways(target, drafter, prompt["input_ids"], depth, **order, **options)
                    runs.append(run | {"prompt": i, "category": prompt["category"]})
                    if run["plain"] != run["drafted"] and not args.temperature:
                        runs[-1]["parting"] = parting(target, prompt["input_ids"], run["plain"], run["drafted"])
        except KeyboardInterrupt:
            if not runs:
                raise
            prompts = prompts[: runs[-1]["prompt"] + 1]
            print(f"\nInterrupted: the report covers the first {len(prompts)} prompts.")
        calls = time_calls(target, drafter, prompts[0]["input_ids"], depth)
        machine["costs"] = asdict(costs_of(target, drafter)) if auto else None

    def part(key, value):
        return summarize([run for run in runs if run[key] == value], depth)

    rows = [{"id": p["id"], "category": p["category"]} | part("prompt", i) for i, p in enumerate(prompts)]
    for i, row in enumerate(rows):
        row["partings"] = [run["parting"] for run in runs if run["prompt"] == i and "parting" in run]
    categories = {name: part("category", name) for name in dict.fromkeys(row["category"] for row in rows)}
    total = summarize(runs, depth) | calls
    total["intervals"] = bootstrap(rows) if total["rounds"] else None
    # Elsewhere than in greedy float32, rounding may decide a near tie differently.
    near = machine["dtype"] != "float32" and all(parting["near_tie"] for row in rows for parting in row["partings"])
    broken = not (total["identical"] or args.temperature or near)
    report = {"settings": asdict(args) | used, "environment": machine, "prompts": rows, "categories": categories}
    return report | {"total": total, "promise_broken": broken}


def print_table(report: dict):
    """Print what [`evaluate`] returned. Counts are sums over the repeats; `saved` are forwards of the target."""
    total, machine, settings = report["total"], report["environment"], report["settings"]
    prepacked = settings["prepack"]
    # A sampled chain has draws of its own, which say nothing of the plain ones.
    drawn = settings["temperature"] and settings["draft_tree"] is None and not settings["prompt_lookup"]

    def cells(row):
        texts = {key: "-" if v is None else f"{v:.2f}" if isinstance(v, float) else v for key, v in row.items()}
        for key in ("joint", "conditional"):
            texts[key] = "".join(f"{'-' if share is None else f'{share:.0%}':>5}" for share in row[key])
        texts["stock"] = f"{texts['stock_tokens_per_second']:>8}" if prepacked else ""
        return texts | {"identical": "-" if drawn else "yes" if row["identical"] else "NO"}

    print(HEADING.format(name="", stock=" stock/s" if prepacked else ""))
    rows = [(row["id"], row) for row in report["prompts"]]
    rows += [(f"all {name}", row) for name, row in report["categories"].items()]
    for name, row in [*rows, ("total", total)]:
        print(ROW.format(name=name, **cells(row)))
    if total["speed_up"] is not None:
        (low, high), (least, most) = (total["intervals"][name] for name in ("speed_up", "tau"))
        words = {key: cells(total)[key] for key in ("joint", "conditional")}
        words["verdict"] = "faster than" if low > 1 else "slower than" if high < 1 else "no clear difference from"
        if len(report["prompts"]) < FEW:  # the interval is over prompts
            words["verdict"] = "too few prompts to compare with"
        # A GPU works on after the call that starts a forward, and the wait for its result falls outside.
        words["rest"] = "Python and waiting for the GPU" if machine["gpu"] else "Python"
        words |= {"prepacked": "prepacked " if prepacked else "", "depth": len(total["joint"]), "inequality": ""}
        if total["drafting_rounds"]:
            words["sign"] = ">" if total["drafting_tau"] > total["drafting_break_even_tau"] else "<="
            words["inequality"] = INEQUALITY.format(**total | words)
        print(SUMMARY.format(low=low, high=high, least=least, most=most, **total | words))
        if prepacked:
            low, high = total["intervals"]["speed_up_over_stock"]
            print(STOCK.format(low=low, high=high, megabytes=machine["prepacked_bytes"] / 1e6, **total))
    if machine["load_warning"]:
        print(machine["load_warning"])
    if drawn:
        print("A sampled chain has the law of plain sampling, but other draws: the answers are not compared.")
    elif not total["identical"]:
        names = ", ".join(row["id"] for row in report["prompts"] if not row["identical"])
        cause = "THIS IS A BUG." if report["promise_broken"] else "Rounding may do that, but not in greedy float32."
        print(f"!!! DRAFTED AND PLAIN ANSWERS DIFFER for {names}. {cause}")
        for row in report["prompts"]:
            for parting in row["partings"]:
                print(PARTING[parting["near_tie"]].format(name=row["id"], **parting))


def main(argv: list[str] | None = None) -> int:
    (args,) = HfArgumentParser(EvaluationArguments).parse_args_into_dataclasses(argv)
    asked = args.held_out_file or args.prompts
    if not (asked.startswith("hf://") or Path(asked).is_file()):
        raise FileNotFoundError(f"There is no file {asked}: name prompts in JSON Lines.")
    if args.output:
        Path(args.output).touch()  # what cannot be written should fail before the measurement
    drafter = load_drafter(args.drafter)
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    prompts = load_prompts(
        args.prompts, args.held_out_file, tokenizer, target, args.num_prompts, args.per_category, args.eval_fraction
    )
    report = evaluate(target, tokenizer, drafter, prompts, args)
    print_table(report)
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n")
    return int(report["promise_broken"])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
