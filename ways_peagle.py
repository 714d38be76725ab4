"""The ways of decoding that `evaluate_peagle.py` compares: one answer in one of them, clocked, and how it differs from plain's."""

import math
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from transformers import DynamicCache, TextStreamer
from transformers.generation.streamers import BaseStreamer

from decoding_peagle import DecodingStats
from tree_peagle import DraftTree


READ = 200  # tokens cached before the repeated plain steps
# Scores this near are a tie, in units of what the dtype can tell apart at the largest one. Reading a text in one forward or
# token by token moved the difference of two by up to 1.8 on small random targets of three families and 1.5 on SmolLM2.
NEAR_TIE = 4
LOOKUP, NODES = 10, 15  # draft tokens of prompt lookup and of a tree, unless told otherwise
NUMBER = r"(:[1-9]\d*)?"
SPELLING = re.compile(rf"stock|plain|lookup{NUMBER}|(auto|(chain|tree|sequential){NUMBER})(\+lookup{NUMBER})?")


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
    def named(cls, name: str, drafter, sequential=None, depth: int | None = None, nodes: int = NODES) -> "Way":
        """The way of that name, where that says nothing of them with so many `nodes` in a tree and the drafter's own `depth`
        if None.

        ValueError: The drafter was not trained for the depth, or that of `sequential` drafts in parallel.
        """
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
        depth = depth or (config.sized_depth if auto else config.speculation_depth)
        tree = "auto" if auto else int(size or nodes) if kind == "tree" else None
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
