"""Measure ways of decoding with a P-EAGLE drafter against plain decoding: `python evaluate_peagle.py`.

Every prompt is answered in all ways in turn, in an order that changes from prompt to prompt, so that a change in the machine's
pace meets all alike. The clock stands while text is shown on the terminal. Decoding runs from the first new token to the end;
what the drafter does with the prompt falls into its first round, so it counts against the drafter.

In float32 on a CPU all ways but `stock` have prepacked linear layers, as stock ones make verification dear (prepack_peagle.py).

In bfloat16 and float16 a forward over several tokens rounds otherwise than one over a single token, so greedy answers may part
at a near tie of the target's scores. Where they part, the report says how near.
"""

import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, HfArgumentParser, TextStreamer
from transformers.generation.streamers import BaseStreamer
from transformers.hf_argparser import HfArg

from data.conversations import read_rows
from data.prompts import EVAL_FRACTION, load_prompts, overlap
from decoding_peagle import DecodingStats, position_limit
from environment_peagle import Disturbance, environment, process_peak
from inference_peagle import load_drafter
from prepack_peagle import prepack
from report_peagle import plot, print_table, summarize_ways
from sizing_peagle import HISTORIES, costs_of
from target_peagle import load_target
from tree_peagle import DraftTree


ROOT = Path(__file__).resolve().parent
SHOWN = 600  # characters of the prompt, from its end
READ, STEPS = (
    200,
    5,
)  # tokens cached before the repeated plain steps, and how many are clocked before each prompt and behind the last
# Scores this near are a tie, in units of what the dtype can tell apart at the largest one. Reading a text in one forward or
# token by token moved the difference of two by up to 1.8 on small random targets of three families and 1.5 on SmolLM2.
NEAR_TIE = 4
INTERRUPTED = 130  # exit status, as of a command that Ctrl-C ends
WAYS, LOOKUP = ("stock", "plain", "lookup", "chain", "tree", "auto"), 10
NUMBER = r"(:[1-9]\d*)?"
SPELLING = re.compile(rf"stock|plain|lookup{NUMBER}|(auto|(chain|tree|sequential){NUMBER})(\+lookup{NUMBER})?")


@dataclass
class EvaluationArguments:
    drafter: str = HfArg(default=str(ROOT), help="Folder or Hub id of the drafter.")
    target: str | None = HfArg(default=None, help="Folder or Hub id of the target; SmolLM2-135M-Instruct if unset.")
    sequential_drafter: str | None = HfArg(
        default=None, help="Folder or Hub id of an autoregressive drafter to compare with: the way `sequential`."
    )
    ways: list[str] | None = HfArg(
        default=None,
        help="What to compare: stock and plain (decoding without drafts, with stock and prepacked layers), lookup[:TOKENS] "
        "(transformers' own prompt lookup), chain[:K], tree[:NODES], auto (as many drafts as pay) and sequential[:K]; "
        "+lookup[:TOKENS] behind one of the last four drafts what followed the newest tokens before as well. "
        f"{' '.join(WAYS)} if unset, and sequential with --sequential_drafter.",
    )
    prompts: str = HfArg(
        default=str(ROOT / "data/prompts.jsonl"),
        help="File (JSON Lines, Parquet), folder or data set of the Hub with messages, a prompt or turns in each row.",
    )
    held_out_file: str | None = HfArg(default=None, help="In place of --prompts: what train_peagle.py held out of it.")
    eval_fraction: float = HfArg(
        default=EVAL_FRACTION, help="The share of --held_out_file and --trained_on that training held out."
    )
    trained_on: list[str] | None = HfArg(
        default=None, help="What the drafter was trained on, to report the prompts that are in it."
    )
    num_prompts: int | None = HfArg(default=None, help="Use the first so many prompts; all if unset.")
    per_category: int | None = HfArg(default=None, help="Use the first so many of each category; all if unset.")
    max_new_tokens: int = HfArg(default=128, help="Longest answer, in tokens.")
    speculation_depth: int | None = HfArg(
        default=None, help="Draft tokens per round (K), or along a path of a tree; the drafter's own if unset."
    )
    nodes: int = HfArg(default=15, help="Draft tokens per round of `tree`.")
    temperature: float = HfArg(default=0.0, help="0 is greedy; above 0 all ways sample, trees by plain's draws.")
    seed: int = HfArg(default=0, help="Seed of the first answer to each prompt; repeats count up from it.")
    repeats: int = HfArg(default=1, help="How often each prompt is answered in each way.")
    output: str | None = HfArg(default=None, help="JSON file for all numbers, settings and versions.")
    plots: str | None = HfArg(default=None, help="Folder for charts of acceptance, categories and sizes (PNG).")
    quiet: bool = HfArg(default=False, help="Show a progress bar in place of the text.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = HfArg(default=None, help="Float32 on a CPU if unset.")
    prepack: bool | None = HfArg(default=None, help="Prepack the linear layers; yes in float32 on a CPU if unset.")

    def __post_init__(self):
        for name in ("repeats", "nodes", "speculation_depth", "max_new_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} is {value}: give a number from 1 on.")
        if self.ways is None:
            self.ways = [*WAYS, *(["sequential"] if self.sequential_drafter else [])]
        for name in self.ways:
            if not SPELLING.fullmatch(name):
                raise ValueError(
                    f"--ways has {name!r}: name stock, plain, lookup, chain, tree, auto or sequential, sizes as in chain:4, "
                    "and prompt lookup beside drafts as in tree:15+lookup:10."
                )
        if "plain" not in self.ways or len(set(self.ways)) < len(self.ways):
            raise ValueError("--ways needs plain, which the others are compared with, and each way once.")
        if any(name.startswith("sequential") for name in self.ways) != (self.sequential_drafter is not None):
            raise ValueError("The way sequential and --sequential_drafter, a folder or Hub id, need each other.")


@dataclass(frozen=True)
class Way:
    """A way of decoding.

    name (`str`): As in `--ways`.
    options (`dict`): What `generate` is given for it.
    depth (`int`): Most draft tokens along a path.
    same_draws (`bool`): Whether it samples the tokens that plain sampling draws with the same seed.
    """

    name: str
    options: dict = field(default_factory=dict)
    depth: int = 0
    same_draws: bool = True

    @classmethod
    def named(cls, name: str, args: EvaluationArguments, drafter, sequential=None) -> "Way":
        """ValueError: The drafter was not trained for the depth, or that of `sequential` drafts in parallel."""
        kind, size, branch, length = re.fullmatch(r"(\w+):?(\d*)(\+lookup)?:?(\d*)", name).groups()
        if kind in ("stock", "plain"):
            return cls(name)
        if kind == "lookup":
            return cls(name, {"prompt_lookup_num_tokens": int(size or LOOKUP)}, int(size or LOOKUP), False)
        drafter, auto = sequential if kind == "sequential" else drafter, kind == "auto"
        config = drafter.config
        if kind == "sequential" and config.parallel_drafting:
            raise ValueError(
                f"The way {name} is of a drafter that drafts one token after the other, but {drafter.name_or_path} drafts in "
                "parallel: give --sequential_drafter another one."
            )
        depth = args.speculation_depth or (config.sized_depth if auto else config.speculation_depth)
        tree = "auto" if auto else int(size or args.nodes) if kind == "tree" else None
        if tree is None and size:
            depth = int(size)
        config.check_depth("the depth", depth, f"the way {name}")
        options = {"assistant_model": drafter, "num_assistant_tokens": depth, "draft_tree": tree}
        if branch:
            options["prompt_lookup_num_tokens"] = int(length or LOOKUP)
            depth = max(depth, options["prompt_lookup_num_tokens"])
        return cls(name, options, depth, same_draws=bool(tree or branch))

    @property
    def drafter(self):
        """Whose drafts they are; None where plain decoding or transformers' own drafting is at work."""
        return self.options.get("assistant_model")


def in_turn(ways: list, turn: int) -> list:
    """A B C, C B A, B C A, A C B, ...: in 2n turns each of n ways has every place twice, and early as often as late."""
    start = turn // 2 % len(ways)
    order = [*ways[start:], *ways[:start]]
    return order[::-1] if turn % 2 else order


class Watch(BaseStreamer):
    """Clocks the `generate` call of a `with` statement, and what the target's forwards in it read and took.

    `prefill_seconds` runs to the first new tokens, `decode_seconds` from there to the end, without what `show` took.
    `memory` is the most that torch held on the GPU meanwhile, in bytes, and NaN elsewhere: the peak of a process does not fall.
    """

    def __init__(self, target, show: TextStreamer | None = None):
        self.target, self.show, self.shown = target, show, 0.0
        self.puts, self.times, self.drafts, self.forward_seconds = [], [], [], []

    def __enter__(self):
        before = self.target.register_forward_pre_hook(self.before, with_kwargs=True)
        self.hooks = [before, self.target.register_forward_hook(self.after)]
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def before(self, _, args, inputs):
        self.drafts.append((args[0] if args else inputs["input_ids"])[0, 1:])
        self.forward_start = time.perf_counter()

    def after(self, *_):
        self.forward_seconds.append(time.perf_counter() - self.forward_start)

    def put(self, value):
        now = time.perf_counter()
        self.puts.append(value.flatten().tolist())
        self.times.append(now - self.shown)
        if len(self.puts) == 2:  # the first ones are the prompt
            self.first = now
        if len(self.puts) > 1 and self.show is not None:
            self.show.put(value)
            self.shown += time.perf_counter() - now

    def end(self):
        self.prefill_seconds = self.first - self.start
        # Where nothing followed the first tokens, there was no decoding to clock.
        self.decode_seconds = time.perf_counter() - self.first - self.shown if len(self.puts) > 2 else 0.0
        gpu = self.target.device.type == "cuda"
        self.memory = torch.cuda.max_memory_allocated(self.target.device) if gpu else math.nan
        if self.show is not None:
            self.show.end()

    def round_seconds(self, puts: list[int]) -> list[float]:
        """What each round took, of which so many `puts` came: from the last of the round before to its own last one."""
        return [end - start for start, end in pairwise(self.times[i] for i in accumulate(puts, initial=1))]

    def rounds(self) -> DecodingStats:
        """What happened in a call without a drafter, where each forward puts what it emits at once."""
        stats = DecodingStats()
        for drafts, emitted, seconds in list(zip(self.drafts, self.puts[1:], self.forward_seconds))[1:]:
            drafts = drafts.tolist()
            same = [draft == token for draft, token in zip(drafts, emitted)]
            stats.record(DraftTree.chain(drafts), [*same, False].index(False), len(emitted), 0.0, seconds)
        return stats


def answer(target, way: Way, input_ids: list[int], seed: int, prepacked=None, show=None, **options) -> dict:
    """Answer `input_ids` in one way; `show` gets the text, and the way `stock` needs the [`Prepacked`] of the target.

    Returns the new `tokens` (list[int]), how many of them were `decoded` after the first came, `prefill_seconds` and
    `decode_seconds`, `memory` (bytes), the `stats` of the rounds and the `round_seconds` of each.
    """
    prompt = torch.tensor([input_ids], device=target.device)
    options |= {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True} | way.options
    torch.manual_seed(seed)
    with prepacked.paused() if way.name == "stock" else nullcontext(), Watch(target, show) as watch:
        output = target.generate(prompt, streamer=watch, **options)
    tokens = output.sequences[0, len(input_ids) :].tolist()
    run = {"tokens": tokens, "decoded": len(tokens) - len(watch.puts[1]), "memory": watch.memory}
    run |= {"prefill_seconds": watch.prefill_seconds, "decode_seconds": watch.decode_seconds}
    stats = watch.rounds() if way.drafter is None else output.stats
    # Our loop puts one token at a time, the others all of a round.
    puts = [1] * len(stats.emitted) if way.drafter is None else stats.emitted
    return run | {"stats": stats, "round_seconds": watch.round_seconds(puts)}


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


def compared(target, ways: list[Way], input_ids: list[int], answers: dict[str, dict], sampled: bool) -> dict:
    """The answers by way with `identical`, whether the tokens are plain's (None where other draws say nothing of it), and
    the [`parting`] of greedy drafted ones that are not."""
    plain = answers["plain"]["tokens"]
    for way in ways:
        run = answers[way.name]
        run["identical"] = run["tokens"] == plain if way.same_draws or not sampled else None
        if run["identical"] is False and way.drafter is not None and not sampled:
            run["parting"] = parting(target, input_ids, plain, run["tokens"])
    return answers


@torch.no_grad()
def plain_steps(target, input_ids: list[int]):
    """A function that takes one plain step of the target with the same tokens cached each time, and returns its seconds."""
    tokens = torch.tensor(input_ids, device=target.device).repeat(READ + 1)[None, : READ + 1]
    cache = DynamicCache(config=target.config)
    target(tokens[:, :-1], cache=cache, use_cache=True)
    cache.activate_past_recording()

    @torch.no_grad()
    def step() -> float:
        start = time.perf_counter()
        # As in decoding, this waits for the result.
        target(tokens[:, -1:], cache=cache, use_cache=True).logits[0, -1].argmax().item()
        seconds = time.perf_counter() - start
        cache.crop(-1)
        return seconds

    return step


def check_lengths(target, prompts: list[dict], max_new_tokens: int):
    """ValueError: A prompt and its answer may be longer than the target can read."""
    limit = position_limit(target)
    longest = {prompt["id"]: len(prompt["input_ids"]) + max_new_tokens for prompt in prompts}
    if long := [f"{name} ({length})" for name, length in longest.items() if length > limit]:
        raise ValueError(
            f"The target has {limit} positions, but with {max_new_tokens} new tokens these prompts may need more: "
            f"{', '.join(long)}. Leave them out, or lower --max_new_tokens."
        )


def evaluate(
    target,
    tokenizer,
    drafter,
    prompts: list[dict],
    args: EvaluationArguments | None = None,
    sequential=None,
    save: Callable[[dict], None] | None = None,
) -> dict:
    """Answer the `prompts` of `read_prompts` in the ways of `args`, whose paths are not read here; `sequential` is the drafter
    of the way of that name. `save` is called with the report. The way `auto` begins knowing nothing of the texts, and what it
    learns from a prompt it takes to the next, as in a service.

    Interrupted (Ctrl-C), it reports on the prompts that were answered, with `interrupted` in its `settings`. So it does where
    an error ends it, which is raised once the report is saved.

    Returns numbers and strings only: `settings`, `environment`, `overlap` (None, for the caller to fill), `ways` (see
    [`summarize_ways`]), and `promise_broken`, whether a greedy answer with drafts was another than the plain one and rounding
    does not explain it.
    """
    args, runs, stopped = args or EvaluationArguments(), [], None
    check_lengths(target, prompts, args.max_new_tokens)
    drafters = [drafter] if sequential is None else [drafter, sequential]
    machine, disturbance, sampled = environment(target), Disturbance(), bool(args.temperature)
    usual = machine["dtype"] == "float32" and target.device.type == "cpu" and torch.backends.mkldnn.is_available()
    packing = usual if args.prepack is None else args.prepack
    ways = [Way.named(name, args, drafter, sequential) for name in args.ways if packing or name != "stock"]
    used = {"drafter": drafter.name_or_path, "target": target.name_or_path}
    used |= {"sequential_drafter": sequential.name_or_path} if sequential is not None else {}
    used |= {"ways": [way.name for way in ways], "prepack": packing}
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": sampled}
    options |= {"temperature": args.temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
    for reason in disturbance.reasons():
        print(f"WARNING: {reason}; the times will not be trusted.")
    shown = next((way for way in reversed(ways) if way.drafter is not None), None)
    with ExitStack() as stack:
        for model in drafters:
            stack.enter_context(model.attach(target, tokenizer))
        prepacked = [stack.push(prepack(model)) for model in (target, *drafters)] if packing else []
        options["prepacked"] = prepacked[0] if packing else None
        machine["prepacked_bytes"] = sum(each.bytes for each in prepacked)
        for way in ways:  # warm up
            short = options | {"max_new_tokens": min(args.max_new_tokens, 16)}
            answer(target, way, prompts[0]["input_ids"], 0, **short)
        HISTORIES.get(target, {}).pop(drafter, None)  # what the warm-up taught `auto` of the first prompt
        step, steps = plain_steps(target, prompts[0]["input_ids"]), []
        try:
            for i, prompt in enumerate(tqdm(prompts, unit=" prompts", disable=not args.quiet)):
                ids, turns = prompt["input_ids"], range(i * args.repeats, (i + 1) * args.repeats)
                if not args.quiet:
                    print(f"\n[{i + 1}/{len(prompts)}] {prompt['id']}\n{tokenizer.decode(ids)[-SHOWN:]}")
                steps += [step() for _ in range(STEPS)]
                for repeat, turn in enumerate(turns):
                    text = None if args.quiet or repeat else TextStreamer(tokenizer, skip_special_tokens=True)
                    answers = {
                        way.name: answer(
                            target, way, ids, args.seed + repeat, show=text if way is shown else None, **options
                        )
                        for way in in_turn(ways, turn)
                    }
                    runs.append({"prompt": i, "answers": compared(target, ways, ids, answers, sampled)})
            steps += [step() for _ in range(STEPS)]
        except (Exception, KeyboardInterrupt) as error:
            if not runs:
                raise
            stopped = error
            prompts = prompts[: runs[-1]["prompt"] + 1]
            print(f"\nInterrupted: the report covers the first {len(prompts)} prompts.")
        machine |= disturbance.report(steps) | {"process_peak_bytes": process_peak()}
        sized = any(way.options.get("draft_tree") == "auto" for way in ways)
        machine["costs"] = asdict(costs_of(target, drafter)) if sized else None
    used["interrupted"] = stopped is not None
    report = {"settings": asdict(args) | used, "environment": machine, "overlap": None}
    report["ways"] = summarize_ways(ways, runs, prompts)
    # Elsewhere than in greedy float32, rounding may decide a near tie differently.
    partings = [one for way in report["ways"].values() for row in way["prompts"] for one in row["partings"]]
    broken = any(machine["dtype"] == "float32" or not one["near_tie"] for one in partings)
    report = without_folders(report | {"promise_broken": broken})
    if save is not None:
        save(report)
    if isinstance(stopped, Exception):
        raise stopped
    return report


def without_folders(report):
    """What lies in this repository is named from its root: reports are shared, the machine's folders are not."""
    text = json.dumps(report).replace(f"{ROOT}/", "")
    return json.loads(re.sub(rf"{re.escape(str(ROOT))}(?![\w.-])", ".", text))


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    (args,) = HfArgumentParser(EvaluationArguments).parse_args_into_dataclasses(argv)
    # What cannot be read or written should fail before the measurement.
    next(iter(read_rows(args.held_out_file or args.prompts)), None)
    if args.output:
        Path(args.output).touch()
    if args.plots:
        Path(args.plots).mkdir(parents=True, exist_ok=True)
    drafter = load_drafter(args.drafter)
    sequential = load_drafter(args.sequential_drafter) if args.sequential_drafter else None
    for name in args.ways:
        Way.named(name, args, drafter, sequential)  # raises what it has to, before the target is loaded
    target, tokenizer = load_target(args.target, dtype=args.dtype)
    prompts = load_prompts(
        args.prompts, args.held_out_file, tokenizer, target, args.num_prompts, args.per_category, args.eval_fraction
    )
    shared = overlap(prompts, args.trained_on, args.eval_fraction) if args.trained_on else None

    def save(report: dict):
        report["settings"]["command"] = without_folders(shlex.join(["python", "evaluate_peagle.py", *argv]))
        report["overlap"] = without_folders(shared)
        if args.output:
            Path(args.output).write_text(json.dumps(report, indent=2) + "\n")

    report = evaluate(target, tokenizer, drafter, prompts, args, sequential, save)
    print_table(report)
    if args.plots:
        plot(report, Path(args.plots))
    return 1 if report["promise_broken"] else INTERRUPTED if report["settings"]["interrupted"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
