"""Measure ways of decoding with a P-EAGLE drafter against plain decoding: `python evaluate_peagle.py`.

Every prompt is answered in all ways in turn, in an order that changes from prompt to prompt, so that a change in the machine's
pace meets all alike. The clock stands while text is shown on the terminal. Decoding runs from the first new token to the end;
what the drafter does with the prompt falls into its first round, so it counts against the drafter.

In float32 on a CPU all ways but `stock` have prepacked linear layers, as stock ones make verification dear (prepack_peagle.py).

In bfloat16 and float16 a forward over several tokens rounds otherwise than one over a single token, so greedy answers may part
at a near tie of the target's scores. Where they part, the report says how near.
"""

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm.auto import tqdm
from transformers import HfArgumentParser, TextStreamer
from transformers.hf_argparser import HfArg

from data.conversations import read_rows
from data.prompts import EVAL_FRACTION, load_prompts, overlap
from decoding_peagle import DecodingStats, position_limit
from environment_peagle import Disturbance, disturbances, environment, process_peak, reasons
from inference_peagle import load_drafter
from prepack_peagle import prepack
from report_peagle import plot, print_table, summarize_ways
from sizing_peagle import HISTORIES, costs_of
from target_peagle import load_target
from ways_peagle import NODES, SPELLING, Way, answer, compared, in_turn, plain_steps


ROOT = Path(__file__).resolve().parent
SHOWN = 600  # characters of the prompt, from its end
STEPS, SHORT = 5, 16  # plain steps that are clocked before each prompt and behind the last; tokens of a warm-up answer
INTERRUPTED = 130  # exit status, as of a command that Ctrl-C ends
WAYS = ("stock", "plain", "lookup", "chain", "tree", "auto")


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
    nodes: int = HfArg(default=NODES, help="Draft tokens per round of `tree`.")
    temperature: float = HfArg(default=0.0, help="0 is greedy; above 0 all ways sample, trees by plain's draws.")
    seed: int = HfArg(default=0, help="Seed of the first answer to each prompt; repeats count up from it.")
    repeats: int = HfArg(default=1, help="How often each prompt is answered in each way.")
    output: str | None = HfArg(default=None, help="JSON file for all numbers, settings and versions.")
    resume: bool = HfArg(
        default=False, help="Go on with what was stopped: its answers lie beside --output until the report is written."
    )
    plots: str | None = HfArg(default=None, help="Folder for charts of acceptance, categories and sizes (PNG).")
    quiet: bool = HfArg(default=False, help="Show a progress bar in place of the text.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = HfArg(default=None, help="Float32 on a CPU if unset.")
    prepack: bool | None = HfArg(default=None, help="Prepack the linear layers; yes in float32 on a CPU if unset.")

    def __post_init__(self):
        for name in ("repeats", "nodes", "speculation_depth", "max_new_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} is {value}: give a number from 1 on.")
        if self.resume and not self.output:
            raise ValueError(
                "--resume needs the --output of the measurement that was stopped: its answers lie beside that."
            )
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


def check_lengths(target, prompts: list[dict], max_new_tokens: int):
    """ValueError: A prompt and its answer may be longer than the target can read."""
    limit = position_limit(target)
    longest = {prompt["id"]: len(prompt["input_ids"]) + max_new_tokens for prompt in prompts}
    if long := [f"{name} ({length})" for name, length in longest.items() if length > limit]:
        raise ValueError(
            f"The target has {limit} positions, but with {max_new_tokens} new tokens these prompts may need more: "
            f"{', '.join(long)}. Leave them out, or lower --max_new_tokens."
        )


def digest(*parts) -> str:
    """SHA-256 of tensors, and of what JSON can say."""
    total = hashlib.sha256()
    for part in parts:
        tensor = isinstance(part, torch.Tensor)
        total.update(part.detach().cpu().flatten().view(torch.uint8).numpy() if tensor else json.dumps(part).encode())
    return total.hexdigest()


class Answered:
    """What was measured so far, a prompt in each line of a file beside the report, for a later call to go on from.

    made (`dict`): What the answers depend on, and what their times do; the file's first line. `rows` (`list[dict]`) are the
        prompts', in their order, each with its `runs` as in [`compared`]. Without a `path` they are kept in memory alone.

    Raises:
        ValueError: To `resume`, there is no such file, or what it holds was made otherwise.
        FileExistsError: There is one, and it is not to be resumed.
    """

    def __init__(self, path: Path | None, made: dict, resume: bool = False):
        self.path, self.rows = path, []
        if path is None:
            return
        self.check(path, resume)
        if resume:
            # A kill in the middle of a line leaves the lines before it.
            lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            os.truncate(path, sum(map(len, lines)))
            before, *self.rows = map(json.loads, lines) if lines else [made]
            differ = [key for key in before | made if before.get(key) != made.get(key)]
            differ = [f"{key} {before.get(key)!r}, not {made.get(key)!r}" for key in differ]
            if differ:
                raise ValueError(
                    f"--resume: {path} was made with {'; '.join(differ)}. Use the same, or another --output."
                )
            for row in self.rows:
                for one in (each for answers in row["runs"] for each in answers.values()):
                    one["stats"] = DecodingStats(**one["stats"])
        self.file = path.open("a")
        if path.stat().st_size == 0:
            self.write(made)

    @staticmethod
    def check(path: Path, resume: bool):
        if resume and not path.exists():
            raise ValueError(f"--resume: there is no {path} to go on from.")
        if path.exists() and not resume:
            raise FileExistsError(
                f"{path} has the answers of a measurement that was stopped: --resume it, or delete them."
            )

    def write(self, row: dict):
        print(json.dumps(row, default=asdict), file=self.file, flush=True)

    def add(self, row: dict):
        self.rows.append(row)
        if self.path is not None:
            self.write(row)

    def done(self):
        """The report is written, and has all that is worth keeping."""
        if self.path is not None:
            self.file.close()
            self.path.unlink()


def evaluate(
    target,
    tokenizer,
    drafter,
    prompts: list[dict],
    args: EvaluationArguments | None = None,
    sequential=None,
    save: Callable[[dict], None] | None = None,
    path: Path | None = None,
) -> dict:
    """Answer the `prompts` of `read_prompts` in the ways of `args`, whose paths are not read here; `sequential` is the drafter
    of the way of that name. `save` is called with the report. The way `auto` begins knowing nothing of the texts, and what it
    learns from a prompt it takes to the next, as in a service.

    Interrupted (Ctrl-C), it reports on the prompts that were answered, with `interrupted` in its `settings`. So it does where
    an error ends it, which is raised once the report is saved. With a `path`, the answers are there until the whole report is
    saved ([`Answered`]), and with `args.resume` the prompts in it are not asked again; `sittings` is in how many it was measured.

    Returns numbers and strings only: `settings`, `environment`, `overlap` (None, for the caller to fill), `ways` (see
    [`summarize_ways`]), and `promise_broken`, whether a greedy answer with drafts was another than the plain one and rounding
    does not explain it.
    """
    args, stopped = args or EvaluationArguments(), None
    check_lengths(target, prompts, args.max_new_tokens)
    drafters = [drafter] if sequential is None else [drafter, sequential]
    machine, disturbance, sampled = environment(target), Disturbance(), bool(args.temperature)
    usual = machine["dtype"] == "float32" and target.device.type == "cpu" and torch.backends.mkldnn.is_available()
    packing = usual if args.prepack is None else args.prepack
    ways = [
        Way.named(name, drafter, sequential, args.speculation_depth, args.nodes)
        for name in args.ways
        if packing or name != "stock"
    ]
    used = {"drafter": drafter.name_or_path, "target": target.name_or_path}
    used |= {"sequential_drafter": sequential.name_or_path} if sequential is not None else {}
    used |= {"ways": [way.name for way in ways], "prepack": packing}
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": sampled}
    options |= {"temperature": args.temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
    made = {name: used[name] for name in ("ways", "target", "prepack")} | machine
    made |= {name: getattr(args, name) for name in ("speculation_depth", "nodes", "seed", "repeats")} | options
    made["prompts"] = digest([[prompt["id"], prompt["input_ids"]] for prompt in prompts])
    made["drafters"] = [digest(each.config.to_json_string(), *each.state_dict().values()) for each in drafters]
    answered = Answered(path, made, args.resume)
    sitting = answered.rows[-1]["sitting"] + 1 if answered.rows else 1
    for reason in reasons(disturbance.load):
        print(f"WARNING: {reason}; the times will not be trusted.")
    shown = next((way for way in reversed(ways) if way.drafter is not None), None)
    with ExitStack() as stack:
        for model in drafters:
            stack.enter_context(model.attach(target, tokenizer))
        prepacked = [stack.push(prepack(model)) for model in (target, *drafters)] if packing else []
        options["prepacked"] = prepacked[0] if packing else None
        machine["prepacked_bytes"] = sum(each.bytes for each in prepacked)
        short, pace = options | {"max_new_tokens": min(args.max_new_tokens, SHORT)}, 0.0
        for way in ways:  # warm up
            run = answer(target, way, prompts[0]["input_ids"], 0, **short)
            pace += run["prefill_seconds"] + run["decode_seconds"] * args.max_new_tokens / len(run["tokens"])
        HISTORIES.get(target, {}).pop(drafter, None)  # what the warm-up taught `auto` of the first prompt
        left = len(prompts) - len(answered.rows)
        minutes = left * args.repeats * pace / 60
        print(
            f"{left} prompts in {len(ways)} ways: about {minutes:.0f} minutes, where all answers are as long as they may be"
        )
        step, steps = plain_steps(target, prompts[0]["input_ids"]), []
        try:
            for i in tqdm(range(len(answered.rows), len(prompts)), unit=" prompts", disable=not args.quiet):
                prompt, runs, steps = prompts[i], [], [step() for _ in range(STEPS)]
                ids = prompt["input_ids"]
                if not args.quiet:
                    print(f"\n[{i + 1}/{len(prompts)}] {prompt['id']}\n{tokenizer.decode(ids)[-SHOWN:]}")
                for repeat in range(args.repeats):
                    text = None if args.quiet or repeat else TextStreamer(tokenizer, skip_special_tokens=True)
                    answers = {
                        way.name: answer(
                            target, way, ids, args.seed + repeat, show=text if way is shown else None, **options
                        )
                        for way in in_turn(ways, i * args.repeats + repeat)
                    }
                    runs.append(compared(target, ways, ids, answers, sampled))
                row = {"id": prompt["id"], "sitting": sitting, "runs": runs, "steps": steps}
                answered.add(row | {"lap": disturbance.lap(), "process_peak_bytes": process_peak()})
                steps = []
            steps = [step() for _ in range(STEPS)]
        except (Exception, KeyboardInterrupt) as error:
            if not answered.rows:
                raise
            stopped = error
            prompts = prompts[: len(answered.rows)]
            print(f"\nInterrupted: the report covers the first {len(prompts)} prompts.")
        sized = any(way.options.get("draft_tree") == "auto" for way in ways)
        machine["costs"] = asdict(costs_of(target, drafter)) if sized else None
        machine |= disturbances(
            [row["lap"] for row in answered.rows], [each for row in answered.rows for each in row["steps"]] + steps
        )
        machine["process_peak_bytes"] = max(row["process_peak_bytes"] for row in answered.rows)
    used |= {"interrupted": stopped is not None, "sittings": answered.rows[-1]["sitting"]}
    report = {"settings": asdict(args) | used, "environment": machine, "overlap": None}
    runs = [{"prompt": i, "answers": answers} for i, row in enumerate(answered.rows) for answers in row["runs"]]
    report["ways"] = summarize_ways(ways, runs, prompts)
    # Elsewhere than in greedy float32, rounding may decide a near tie differently.
    partings = [one for way in report["ways"].values() for row in way["prompts"] for one in row["partings"]]
    broken = any(machine["dtype"] == "float32" or not one["near_tie"] for one in partings)
    report = without_folders(report | {"promise_broken": broken})
    if save is not None:
        save(report)
    if stopped is None:
        answered.done()
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
    kept = Path(f"{args.output}.answers.jsonl") if args.output else None
    if args.output:
        Answered.check(kept, args.resume)
        Path(args.output).touch()
    if args.plots:
        Path(args.plots).mkdir(parents=True, exist_ok=True)
    drafter = load_drafter(args.drafter)
    sequential = load_drafter(args.sequential_drafter) if args.sequential_drafter else None
    for name in args.ways:
        Way.named(
            name, drafter, sequential, args.speculation_depth
        )  # raises what it has to, before the target is loaded
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

    report = evaluate(target, tokenizer, drafter, prompts, args, sequential, save, kept)
    print_table(report)
    if args.output and report["settings"]["interrupted"]:
        print("Go on with the same command and --resume.")
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
