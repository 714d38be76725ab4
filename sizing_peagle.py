"""Drafts sized by cost: what a forward takes on this machine, how many draft tokens pay, and when none does.

A round emits one token and as many more as are kept, which the calibrated probabilities of the tree foretell. It costs a
forward of the drafter and one of the target, which takes longer the more rows it has. Both are measured once for a pair, and
what its calls learn, of these and of the texts, the next ones begin with.
"""

import math
import statistics
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

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
HEAD_START, ALLOWANCE, SAVINGS = 2.0, 0.02, 8.0
# So many failures in a row are remembered, for a text may come that is not like the last ones.
MOST_FAILURES = 9
# How quickly trust follows what is kept, and how far it goes.
LEARNING, MOST_TRUST = 0.1, 10.0
# What rounds really take is the median of so many; a plain one is seen after so many drafted ones, and ever more.
SAMPLES, PLAIN_AFTER = 5, 8


@dataclass(frozen=True)
class Costs:
    """What the parts of a round take, in seconds, for one pair of target and drafter on one machine. Plain numbers, for JSON.

    rows (`list[int]`): Numbers of rows, ascending from 1.
    target (`list[float]`): The target's forward over so many rows; linear between them, and beyond as between the last two.
    draft (`float`): The drafter's forward for all its depths (of a sequential drafter, those for its `speculation_depth`).
    host (`float`): All else in a round with drafts.
    read (`float`): What the drafter takes longer for each slot beyond the first that it reads, as it does behind a pause.

    ValueError: These are no such numbers.
    """

    rows: list[int]
    target: list[float]
    draft: float
    host: float = 0.0
    read: float = 0.0

    def __post_init__(self):
        ascending = list(self.rows) == sorted(set(self.rows)) and list(self.rows[:1]) == [1]
        times = all(0 < seconds < float("inf") for seconds in self.target)
        if not (ascending and len(self.target) == len(self.rows) and times):
            raise ValueError(f"Costs need ascending rows from 1 on and a positive time for each, not {self}.")
        if not (self.draft >= 0 and self.host >= 0 and self.read >= 0):
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
        return Costs(self.rows, target, self.draft * target[0] / self.target[0], self.host, self.read * batch)

    def reading(self, unread: int) -> float:
        """What the drafter takes longer for reading `unread` slots and not one."""
        return self.read * max(unread - 1, 0)

    def round(self, nodes: int, unread: int = 1) -> float:
        """A round that drafts, where the drafter reads `unread` slots, and verifies `nodes` draft tokens."""
        return self.draft + self.reading(unread) + self.forward(nodes + 1) + self.host


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

    def catch_up():
        return drafter.draft(unread[: read + 1], features, depths, DynamicCache(), embedding)

    calls = [*(partial(verify, rows) for rows in sizes), draft, catch_up]
    times = [[] for _ in calls]
    verify(1), draft(), catch_up()
    start = time.perf_counter()
    for repeat in range(REPEATS):
        for call, seen in zip(calls, times):
            clock = time.perf_counter()
            if repeat and clock - start > SECONDS:
                break
            call().argmax(dim=-1).tolist()  # as in decoding, this waits for an accelerator's result
            seen.append(time.perf_counter() - clock)
    *forwards, drafting, reading = map(statistics.median, times)
    # More rows never take less: where it seems so, something disturbed the fewer ones.
    forwards = [min(forwards[size:]) for size in range(len(forwards))]
    return Costs(sizes, forwards, drafting, read=max(reading - drafting, 0.0) / max(read - 1, 1))


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


class History:
    """What the calls with one pair of target and drafter have learned, which is where the next one begins.

    Several threads may decode with the pair; `lock` is held while it is changed.
    """

    def __init__(self):
        self.lock, self.balance, self.failures = threading.Lock(), HEAD_START, 0
        # The probability of a draft token, given those before it, is so many times what the drafter says.
        self.trust = 1.0
        # How many times as long as the costs say the last rounds took, plain ones and drafted ones; drafted ones in a row.
        self.paces, self.run = (deque(maxlen=SAMPLES), deque(maxlen=SAMPLES)), 0


HISTORIES = weakref.WeakKeyDictionary()


def history_of(target, drafter, *kind) -> History:
    """The one of this pair, for each `kind` of call."""
    with LOCK:
        histories = HISTORIES.setdefault(target, weakref.WeakKeyDictionary()).setdefault(drafter, {})
        return histories.setdefault(kind, History())


class Sizer:
    """How much one call drafts: [`drafts`], [`cut`] if so, and [`record`] in each round.

    A round with drafts gains the tokens that it emits less the plain ones that could have been had in its time. Gains are
    saved and losses paid from the savings, up to a limit; once these are used up, rounds are plain, and each saves a little
    for the next try, less after every try that fails. The call has such a balance and so has the pair, and both must allow a
    try: a text of which nothing is accepted is soon left alone, and where no text gains, calls begin without drafts. So with
    all calls of a pair together, of the time of n plain tokens, prompts included, drafts lose at most
    `HEAD_START + ALLOWANCE * n` and one round, whatever the drafter promises. The choice changes the time, never the tokens.

    Args:
        costs (`Costs`): Of the pair.
        depth (`int`): Most tokens along a path of a tree.
        clocked (`bool`): Correct the costs by what rounds really take.
        history (`History`, *optional*): Of the pair; that of a new one if unset.
    """

    def __init__(self, costs: Costs, depth: int, clocked: bool, history: History | None = None):
        self.costs, self.clocked, self.history = costs, clocked, history or History()
        # What costs more than the steps that it can save at best cannot pay.
        step, sizes = costs.forward(1), range(1, MOST_NODES + 1)
        self.most = max((n for n in sizes if costs.round(n) < (min(n, depth) + 1) * step), default=0)
        self.balance, self.unread = HEAD_START, None

    def drafts(self, unread: int) -> bool:
        """Whether this round is to draft, before which the drafter would read `unread` slots; called once, as it begins."""
        history, step = self.history, self.costs.forward(1)
        self.start, self.drafted, reading = time.perf_counter(), False, self.costs.reading(unread) / step
        with history.lock:
            if self.unread is None:  # what was read yet is the prompt, whose forward plain decoding takes, too
                self.limit = SAVINGS + reading
                history.balance = min(history.balance, self.limit) + self.saved(self.costs.forward(unread) / step)
            self.unread = unread
            looks = self.clocked and history.run >= PLAIN_AFTER * (1 + len(history.paces[False]))
            return history.balance >= reading and self.balance >= 0 and not looks

    def cut(self, tree: DraftTree) -> DraftTree:
        """Of the drafts of a round, the most probable ones that give the most tokens per second; perhaps none."""
        self.drafted, tree = True, tree.ranked()

        def best(probabilities: list[float]) -> int:
            tokens = accumulate(probabilities, initial=1.0)
            rates = [expected / self.costs.round(nodes) for nodes, expected in enumerate(tokens)]
            return rates.index(max(rates))

        # A drafter that is not trusted is still put to the test, or it could never win trust back.
        said = [tree.probability(node) for node in range(1, len(tree.tokens) + 1)]
        return tree.first(best(self.probabilities(tree)) or min(best(said), 1))

    def probabilities(self, tree: DraftTree) -> list[float]:
        """Those of the draft tokens to be kept, as the drafter's trust makes them."""
        trust = self.history.trust
        return [min(tree.probability(node) * trust**depth, 1.0) for node, depth in enumerate(tree.depths)][1:]

    def record(self, trees: list[DraftTree], emitted: list[int]):
        """What the round came to: for each row the draft tokens that were verified and how many tokens were emitted."""
        history, step = self.history, self.costs.forward(1)
        new = sum(emitted) / len(emitted)
        promised = sum(sum(self.probabilities(tree)) for tree in trees) / len(trees)
        nodes = max(len(tree.tokens) for tree in trees)
        cost = self.costs.round(nodes, self.unread) if self.drafted else step
        with history.lock:
            if self.clocked:
                history.paces[self.drafted].append((time.perf_counter() - self.start) / cost)
            if not self.drafted:
                history.run = 0
                history.balance += self.saved(new)
                self.balance += self.saved(new)
                return
            pace = 1.0
            if all(history.paces):
                plain, drafted = map(statistics.median, history.paces)
                pace = drafted / plain
            history.run += 1
            # What the drafter had to read costs time, but is no sign of how it does on this text.
            reading = pace * self.costs.reading(self.unread) / step
            gain = new - pace * cost / step + reading
            history.balance = min(history.balance + gain - reading, self.limit)
            self.balance = min(self.balance + gain, SAVINGS)
            if gain > 0:
                history.failures = 0
            elif self.balance < 0 or history.balance < 0:
                history.failures = min(history.failures + 1, MOST_FAILURES)
            history.trust *= math.exp(LEARNING * (new - 1 - promised) / (1 + promised))
            history.trust = min(max(history.trust, 1 / MOST_TRUST), MOST_TRUST)

    def saved(self, tokens: float) -> float:
        """What plain decoding that took the time of `tokens` tokens lets drafts lose."""
        return ALLOWANCE * tokens / (1 + self.history.failures)
