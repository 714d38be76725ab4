"""Drafts sized by cost: what a forward takes on this machine, how many draft tokens pay, and when none does.

A round emits one token and as many more as are kept, which the calibrated probabilities of the tree foretell. It costs a
forward of the drafter and one of the target, which takes longer the more rows it has. Both are measured once for a pair.
"""

import statistics
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
from transformers.cache_utils import DynamicCache


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .tree_peagle import DraftTree
except ImportError:
    from tree_peagle import DraftTree


# What is measured: forwards over so many rows behind so many tokens, each so often unless the seconds are up before.
ROWS, READ, REPEATS, SECONDS = (1, 2, 4, 8, 16, 32), 64, 9, 1.0
MOST_NODES = 63

# All of these in tokens of plain decoding. What drafts may lose: at first; for each plain token; of what they gained before.
HEAD_START, ALLOWANCE, SAVINGS = 2.0, 0.015, 8.0
# What rounds really take is the median of so many; a plain one is seen after so many drafted ones, and ever more.
SAMPLES, PLAIN_AFTER = 5, 8


@dataclass(frozen=True)
class Costs:
    """What the parts of a round take, in seconds, for one pair of target and drafter on one machine. Plain numbers, for JSON.

    rows (`list[int]`): Numbers of rows, ascending from 1.
    target (`list[float]`): The target's forward over so many rows; linear between them, and beyond as between the last two.
    draft (`float`): The drafter's forward for all its depths (of a sequential drafter, those for its `speculation_depth`).
    host (`float`): All else in a round with drafts.

    ValueError: These are no such numbers.
    """

    rows: list[int]
    target: list[float]
    draft: float
    host: float = 0.0

    def __post_init__(self):
        ascending = list(self.rows) == sorted(set(self.rows)) and list(self.rows[:1]) == [1]
        times = all(0 < seconds < float("inf") for seconds in self.target)
        if not (ascending and len(self.target) == len(self.rows) and times):
            raise ValueError(f"Costs need ascending rows from 1 on and a positive time for each, not {self}.")
        if not (self.draft >= 0 and self.host >= 0):
            raise ValueError(f"Costs of the drafter and the host are at least 0, not {self}.")

    def forward(self, rows: int) -> float:
        """The target's forward over `rows` rows."""
        if len(self.rows) == 1:
            return self.target[0]
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (x, other), (y, end) = self.rows[right - 1 : right + 1], self.target[right - 1 : right + 1]
        slope = (end - y) / (other - x)
        if rows > other:  # noise must not make more rows cheaper without end
            return end + max(slope, 0.0) * (rows - other)
        return y + slope * (rows - x)

    def of_batch(self, batch: int) -> "Costs":
        """The same with rows per prompt of a batch; the drafter's forward grows as the target's does over single rows."""
        target = [self.forward(batch * rows) for rows in self.rows]
        return Costs(self.rows, target, self.draft * target[0] / self.target[0], self.host)

    def round(self, nodes: int) -> float:
        """A round that drafts and verifies `nodes` draft tokens."""
        return self.draft + self.forward(nodes + 1) + self.host


@torch.no_grad()
def measure_costs(target, drafter) -> Costs:
    """Measure [`Costs`] on scratch caches, in about a second; with large targets in two forwards of each size.

    Sizes take turns, so that a change in the machine's pace meets them all; the median counts. Draws no random numbers.
    """
    table = target.get_input_embeddings().weight
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None) or READ + ROWS[-1]
    read = min(READ, limit // 2)
    sizes = [rows for rows in ROWS if read + rows <= limit]
    tokens = torch.arange(read + sizes[-1] + 1, device=target.device) % len(table)
    layer_ids, depths = drafter.config.eagle_aux_hidden_state_layer_ids, drafter.config.sized_depth
    embedding = None if drafter.config.own_embeddings else table.to(drafter.device)
    features = torch.ones(1, read, drafter.config.num_features, device=drafter.device)
    cache, draft_cache = DynamicCache(config=target.config), DynamicCache()
    target(tokens[None, :read], cache=cache, use_cache=True)
    cache.activate_past_recording()
    unread = tokens.to(drafter.device)
    drafter.draft(unread[: read + 1], features, 1, draft_cache, embedding)

    def verify(rows: int):
        new = tokens[None, read : read + rows]
        outputs = target(new, cache=cache, use_cache=True, output_hidden_states=layer_ids)
        cache.crop(-rows)
        return outputs.logits[0]

    def draft():
        logits = drafter.draft(unread[read - 1 : read + 1], features[:, :1], depths, draft_cache, embedding)
        draft_cache.crop(-1)
        return logits

    calls = [*(partial(verify, rows) for rows in sizes), draft]
    times = [[] for _ in calls]
    verify(1), draft()
    start = time.perf_counter()
    for repeat in range(REPEATS):
        for call, seen in zip(calls, times):
            clock = time.perf_counter()
            if repeat and clock - start > SECONDS:
                break
            call().argmax(dim=-1).tolist()  # as in decoding, this waits for an accelerator's result
            seen.append(time.perf_counter() - clock)
    *forwards, drafting = map(statistics.median, times)
    return Costs(sizes, forwards, drafting)


KNOWN, LOCK = weakref.WeakKeyDictionary(), threading.Lock()


def costs_of(target, drafter) -> Costs:
    """[`measure_costs`] of this pair, measured anew only where one of them or the number of threads has changed."""

    def kind(model) -> tuple:
        # Prepacked layers have a forward of their own.
        layers = sum("forward" in vars(module) for module in model.modules())
        return str(model.device), model.dtype, model.config.get_text_config()._attn_implementation, layers

    with LOCK:
        known = KNOWN.setdefault(target, weakref.WeakKeyDictionary()).setdefault(drafter, {})
        state = kind(target), kind(drafter), torch.get_num_threads()
        if state not in known:
            known[state] = measure_costs(target, drafter)
        return known[state]


class Sizer:
    """How much one call drafts: [`drafts`], [`cut`] if so, and [`record`] in each round.

    A round with drafts gains the tokens that it emits less the plain ones that could have been had in its time. Gains are
    saved and losses paid from the savings, up to a limit; once these are used up, rounds are plain, and each saves a little
    for the next try, less after every try that fails. So of n tokens, drafts lose at most `HEAD_START + ALLOWANCE * n` and
    one round, whatever the drafter promises, and a good drafter is hardly ever paused.

    Args:
        costs (`Costs`): Of the pair.
        depth (`int`): Most tokens along a path of a tree.
        clocked (`bool`): Correct the costs by what rounds really take in this call.
    """

    def __init__(self, costs: Costs, depth: int, clocked: bool):
        self.costs, self.clocked = costs, clocked
        # What costs more than the steps that it can save at best cannot pay.
        step, sizes = costs.forward(1), range(1, MOST_NODES + 1)
        self.most = max((n for n in sizes if costs.round(n) < (min(n, depth) + 1) * step), default=0)
        self.balance, self.failures, self.run = HEAD_START, 0, 0
        # How many times as long as the costs say the last rounds took, plain ones and drafted ones.
        self.paces = deque(maxlen=SAMPLES), deque(maxlen=SAMPLES)

    def drafts(self) -> bool:
        """Whether this round is to draft; call it once, at the beginning of the round."""
        self.start, self.drafted = time.perf_counter(), False
        return self.balance >= 0 and not (self.clocked and self.run >= PLAIN_AFTER * (1 + len(self.paces[False])))

    def cut(self, tree: DraftTree) -> DraftTree:
        """Of the drafts of a round, the most probable ones that give the most tokens per second; perhaps none."""
        self.drafted, tree = True, tree.ranked()
        size, tokens = 0, 1.0
        best = tokens / self.costs.round(0)
        for nodes in range(1, len(tree.tokens) + 1):
            tokens += tree.probability(nodes)
            if tokens / self.costs.round(nodes) > best:
                size, best = nodes, tokens / self.costs.round(nodes)
        return tree.first(size)

    def record(self, nodes: int, emitted: int):
        """What the round came to: it verified `nodes` draft tokens and emitted `emitted` tokens."""
        step = self.costs.forward(1)
        cost = self.costs.round(nodes) if self.drafted else step
        # Behind a plain round the drafter had more to read than the tokens of one round.
        if self.clocked and (self.run or not self.drafted):
            self.paces[self.drafted].append((time.perf_counter() - self.start) / cost)
        if self.drafted:
            if all(self.paces):
                plain, drafted = map(statistics.median, self.paces)
                cost *= drafted / plain
            gain = emitted - cost / step
            self.balance, self.run = min(self.balance + gain, SAVINGS), self.run + 1
            if gain > 0:
                self.failures = 0
            elif self.balance < 0:
                self.failures += 1
        else:
            self.balance, self.run = self.balance + ALLOWANCE * emitted / (1 + self.failures), 0
