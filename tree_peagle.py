"""Draft trees: the continuations of the sequence that one target forward verifies.

A parallel drafter gives one law per depth in a single forward. The most probable combinations make a tree, which holds more
of what the target may say than the chain of the argmaxes does. What is approximate here costs speed at worst: the target
decides on every token, whatever the tree holds.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F


CHUNK = 128  # the quickest of 32 to 256 for `top` at vocabularies of 49,152 and 262,144
SMALL = 2**14  # vocabularies below it are quicker searched as a whole


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens below the newest token of the sequence. That token is node 0, the root; drafts are nodes 1 to N.

    `tokens` are target-vocabulary ids; `parents` are node numbers, each before its child's; `log_probs` are those of the path
    from the root (0.0 where unknown) and never rise along it. Otherwise, or if siblings share a token: ValueError.

    `laws` belong to a chain whose tokens were drawn: target-vocabulary ids `(n,)`, and the probabilities `(N, n)` of these in
    the draw of each token, given those before it. None if the tokens were chosen otherwise. A tree made of a part of this one
    has none, which is no fault: drawn tokens may be verified as chosen ones, too.
    """

    tokens: list[int]
    parents: list[int]
    log_probs: list[float]
    laws: tuple[torch.LongTensor, torch.Tensor] | None = field(default=None, compare=False)

    def __post_init__(self):
        if not len(self.tokens) == len(self.parents) == len(self.log_probs):
            raise ValueError("A draft tree needs one parent and one log-probability for each of its tokens.")
        children, log_probs = [{}], [0.0, *self.log_probs]
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents), start=1):
            if not 0 <= parent < node:
                raise ValueError(f"Node {node} of a draft tree has the parent {parent}, which is not before it.")
            if token in children[parent]:  # verification finds a child by its token
                raise ValueError(f"Node {parent} of a draft tree has two children with the token {token}.")
            if not log_probs[node] <= log_probs[parent]:  # so NaN is refused, too
                raise ValueError(f"Node {node} of a draft tree must not be more probable than its parent {parent}.")
            children[parent][token] = node
            children.append({})
        object.__setattr__(self, "_children", children)

    @classmethod
    def chain(cls, tokens: list[int], log_probs: list[float] | None = None, laws=None) -> "DraftTree":
        return cls(tokens, list(range(len(tokens))), [0.0] * len(tokens) if log_probs is None else log_probs, laws)

    def first(self, num_nodes: int | None) -> "DraftTree":
        """The tree of the first nodes, with their ancestors as these come before."""
        return DraftTree(self.tokens[:num_nodes], self.parents[:num_nodes], self.log_probs[:num_nodes])

    def ranked(self) -> "DraftTree":
        """The same tree, the most probable nodes first."""
        order = sorted(range(len(self.tokens)), key=lambda i: -self.log_probs[i])  # stable, so parents stay before
        number = {0: 0} | {i + 1: node for node, i in enumerate(order, start=1)}
        parents = [number[self.parents[i]] for i in order]
        return DraftTree([self.tokens[i] for i in order], parents, [self.log_probs[i] for i in order])

    def children(self, node: int) -> dict[int, int]:
        """From the token to the number of each child of `node`."""
        return self._children[node]

    @cached_property
    def depths(self) -> list[int]:
        """How far behind the root each of the N + 1 nodes is, itself at 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def is_chain(self) -> bool:
        """Every node's parent is the node before it, so that causal attention verifies it."""
        return self.parents == list(range(len(self.parents)))

    @property
    def expected_accepted(self) -> float:
        """Draft tokens that are kept on average, if the probabilities are calibrated."""
        return sum(map(math.exp, self.log_probs))

    def probability(self, node: int) -> float:
        return math.exp(self.log_probs[node - 1]) if node else 1.0

    def path(self, node: int) -> list[int]:
        """Node numbers from the root to `node`, both included."""
        return [*self.path(self.parents[node - 1]), node] if node else [0]

    def ancestors(self) -> torch.BoolTensor:
        """The tree's block of the verification mask, `(N + 1, N + 1)`: whether the row's node is the column's or below it."""
        size = len(self.tokens) + 1
        mask = bytearray(size * size)  # a row is its parent's and the node; as tensor operations this would be slow
        mask[0] = True
        for node, parent in enumerate(self.parents, start=1):
            mask[node * size : (node + 1) * size] = mask[parent * size : (parent + 1) * size]
            mask[node * size + node] = True
        return torch.frombuffer(mask, dtype=torch.bool).view(size, size)


class NoLaw(ValueError):
    """The drafter's scores give no distribution."""


@dataclass
class Candidates:
    """What the drafter proposes: C tokens per depth, and their law given the choice at the depth before.

    `tokens[depth][candidate]` are target-vocabulary ids. `log_probs[depth]`, `(rows, C)`, has a row for each candidate of the
    depth before, or one row where that makes no difference, as at depth 0.
    """

    tokens: list[list[int]]
    log_probs: list[np.ndarray]
    _ranked: dict = field(default_factory=dict, init=False, repr=False)

    def choice(self, depth: int, previous: int, rank: int) -> tuple[float, int] | None:
        """`(log_prob, candidate)` of the one of this rank after candidate `previous`, 0 being the best and ties in their order;
        None if so many are not possible."""
        row = previous if len(self.log_probs[depth]) > 1 else 0
        if (depth, row) not in self._ranked:  # a tree looks at few of the rows
            law = self.log_probs[depth][row].tolist()
            self._ranked[depth, row] = law, sorted(range(len(law)), key=law.__getitem__, reverse=True)
        law, order = self._ranked[depth, row]
        if rank < len(order) and law[order[rank]] > -math.inf:
            return law[order[rank]], order[rank]
        return None

    def behind_best(self):
        """Rules out what follows another candidate than the best of its depth, behind which alone a law is known."""
        for depth, law in enumerate(self.log_probs[1:], start=1):
            self.log_probs[depth] = np.pad(law, ((0, law.shape[1] - 1), (0, 0)), constant_values=-math.inf)


def top(logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`logits.topk(num)` of a matrix, up to ties. The largest `num` lie in the `num` chunks with the largest maxima."""
    whole = logits.shape[1] - logits.shape[1] % CHUNK
    if whole < max(2 * num * CHUNK, SMALL):  # too little would be ruled out
        return logits.topk(num)
    chunks = logits[:, :whole].unflatten(1, (-1, CHUNK)).amax(dim=-1).topk(num).indices
    places = (chunks[:, :, None] * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(1)
    rest = torch.arange(whole, logits.shape[1], device=logits.device)
    places = torch.cat([places, rest.expand(len(logits), -1)], dim=1)
    values, best = logits.gather(1, places).topk(num)
    return values, places.gather(1, best)


@torch.no_grad()
def candidates(
    logits: torch.Tensor,
    num: int,
    draft_ids: torch.Tensor | None = None,
    temperatures: list[float] | None = None,
    transition: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> Candidates:
    """The `num` most probable tokens of each depth (or all there are) with their calibrated log-probabilities.

    A `transition` changes the law over the candidates, not which they are, and all other tokens keep their unbiased weight
    in it. So no parent costs a pass over the vocabulary, and only the ranking of the drafts is approximate.

    Args:
        logits (`torch.Tensor` of shape `(K, draft_vocab)`, floating point): The drafter's, one row per depth.
        draft_ids (`torch.LongTensor` of shape `(draft_vocab,)`): Their target-vocabulary ids; the indices if unset.
        temperatures (`list[float]`): Divisors of the logits for each of the K depths or more, see `fit_temperature`.
        transition (`Callable`): From draft-vocabulary indices `(K - 1, n)` at all depths but the last and `(K - 1, m)` at the
            next ones to the bias `(K - 1, n, m)` on the latter's logits (before the temperature).

    NoLaw: Logits hold NaN or +inf or exclude every token of a depth. ValueError: Temperatures are too few or not positive.
    """
    depths, vocab = logits.shape
    temperatures = [1.0] * depths if temperatures is None else temperatures[:depths]
    if len(temperatures) < depths or not all(temperature > 0 for temperature in temperatures):
        raise ValueError(f"{depths} depths need as many positive temperatures, got {temperatures}.")
    logits = logits.float()
    values, indices = top(logits, min(num, vocab))
    divisors = torch.tensor(temperatures, device=logits.device)[:, None]
    scaled = (logits - values[:, :1]).div_(divisors)
    scores = scaled.gather(1, indices)
    # Weights of the others, summed without the candidates: the difference of two sums would not tell a small one from
    # rounding. They are one more column of the law.
    tail = scaled.exp_().scatter_(1, indices, 0.0).sum(dim=1, keepdim=True).log_()
    scores = torch.cat([scores, tail], dim=1)[:, None]
    if transition is not None:
        scores = scores.repeat(1, indices.shape[1], 1)
        scores[1:, :, :-1] += transition(indices[:-1], indices[1:]) / divisors[1:, None]
    log_probs = scores.log_softmax(dim=-1)[..., :-1]
    laws = [*log_probs.cpu().numpy()]
    laws[0] = laws[0][:1]
    if any(np.isnan(law[:, 0]).any() for law in laws):
        raise NoLaw("The drafter's logits hold NaN or +inf, or exclude every token of a depth.")
    return Candidates((indices if draft_ids is None else draft_ids[indices]).tolist(), laws)


def best_first(candidates: Candidates, num_nodes: int, max_depth: int | None = None) -> DraftTree:
    """The tree of the `num_nodes` most probable paths of at most `max_depth` tokens, best first, or of all there are.

    A path is never more probable than its beginning, so they make a tree, and no other of that size is expected to have more
    accepted. A heap finds them among the laws of one forward, as in DDTree (https://huggingface.co/papers/2604.12989);
    EAGLE-2 (https://huggingface.co/papers/2406.16858) ranks by the same product, with a forward per depth. With laws
    that do not depend on the depth before, `num_nodes` candidates per depth miss nothing. Ties go to the shallower node, the
    older parent, the better rank.
    """
    limit = len(candidates.tokens) if max_depth is None else min(max_depth, len(candidates.tokens))
    nodes, tokens, parents, heap = [(0, 0, 0.0)], [], [], []  # nodes: depth, candidate and log-probability of the path

    def offer(parent, rank):
        depth, previous, log_prob = nodes[parent]
        choice = candidates.choice(depth, previous, rank) if depth < limit else None
        if choice is not None:
            heapq.heappush(heap, (-(log_prob + choice[0]), depth, parent, rank, choice[1]))

    offer(0, 0)
    while heap and len(tokens) < num_nodes:
        cost, depth, parent, rank, candidate = heapq.heappop(heap)
        nodes.append((depth + 1, candidate, -cost))
        tokens.append(candidates.tokens[depth][candidate])
        parents.append(parent)
        offer(parent, rank + 1)
        offer(len(tokens), 0)
    return DraftTree(tokens, parents, [log_prob for _, _, log_prob in nodes[1:]])


def checked_paths(paths, depths: int, ranks: int) -> list[tuple[int, ...]]:
    """The paths of a fixed tree, shallow ones first; ValueError if they make none within `depths` and `ranks`."""
    paths = [tuple(path) if isinstance(path, (list, tuple)) else path for path in paths]
    for path in paths:
        if not (isinstance(path, tuple) and path and all(type(rank) is int and 0 <= rank < ranks for rank in path)):
            raise ValueError(f"Path {path!r} in draft_tree: pass one rank per token, from 0 to {ranks - 1}.")
        if len(path) > depths:
            raise ValueError(f"draft_tree is {len(path)} tokens deep, but this drafter was trained for {depths}.")
        if path[:-1] and path[:-1] not in paths:
            raise ValueError(f"Path {path} in draft_tree needs {path[:-1]}, which is missing.")
    if len(set(paths)) < len(paths):
        raise ValueError("A path in draft_tree is listed twice.")
    return sorted(paths, key=len)


def static_tree(paths: list[tuple[int, ...]], candidates: Candidates) -> DraftTree:
    """A tree of one shape, as in Medusa (https://huggingface.co/papers/2401.10774), shallow nodes first.

    `paths` lists, for each node, the ranks along its path: 0 is the most probable token after the node above. Impossible
    tokens are left out with all below them. ValueError: see [`checked_paths`].
    """
    places, tokens, parents, log_probs = {(): (0, 0, 0.0)}, [], [], []  # places: node, candidate and log-probability
    for path in checked_paths(paths, len(candidates.tokens), len(candidates.tokens[0])):
        depth = len(path) - 1
        above, places[path] = places[path[:-1]], None
        choice = candidates.choice(depth, above[1], path[-1]) if above else None
        if choice is not None:
            log_prob, candidate = choice
            tokens.append(candidates.tokens[depth][candidate])
            parents.append(above[0])
            log_probs.append(above[2] + log_prob)
            places[path] = len(tokens), candidate, log_probs[-1]
    return DraftTree(tokens, parents, log_probs)


def prompt_lookup(tokens: list[int], num_tokens: int, max_ngram: int = 3, min_ngram: int = 2) -> list[int]:
    """Prompt lookup: the tokens, `num_tokens` at most, that followed an earlier occurrence of the newest ones of `tokens`.

    Of as many of the newest as possible, `min_ngram` to `max_ngram`, and of those the most recent. Empty if there is none.
    """
    ids, start = np.fromiter(tokens, np.int64, len(tokens)), len(tokens)
    ends = np.arange(len(tokens) - 1)  # of earlier occurrences
    for length in range(1, min(max_ngram, len(tokens)) + 1):
        ends = ends[ends >= length - 1]
        ends = ends[ids[ends - length + 1] == ids[-length]]
        if length >= min_ngram and len(ends):
            start = ends[-1] + 1
    return tokens[start : start + num_tokens]


def with_branch(tree: DraftTree, tokens: list[int], log_prob: float, max_nodes: int) -> DraftTree:
    """`tree` and the path `tokens` from the root, of `prompt_lookup` for instance, in one of at most `max_nodes` drafts.

    Nodes that both have stay as they are; each new one adds `log_prob` to its parent's. Where there is no room, the least
    probable leaves that are not on the path go first; a path that is longer than the room is cut.
    """
    paths = [()]
    for token, parent in zip(tree.tokens, tree.parents):
        paths.append((*paths[parent], token))
    nodes = dict(zip(paths[1:], tree.log_probs))
    branch = [tuple(tokens[:length]) for length in range(1, min(len(tokens), max_nodes) + 1)]
    for path in branch:
        nodes.setdefault(path, nodes.get(path[:-1], 0.0) + log_prob)
    # The most probable nodes hold their own ancestors, as log-probabilities never rise along a path.
    others = sorted((path for path in nodes if path not in branch), key=lambda path: -nodes[path])
    kept = {*branch, *others[: max_nodes - len(branch)]}
    kept = [path for path in nodes if path in kept]
    number = {path: node for node, path in enumerate([(), *kept])}
    parents = [number[path[:-1]] for path in kept]
    return DraftTree([path[-1] for path in kept], parents, [nodes[path] for path in kept])


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The temperature from 0.25 to 4 that makes the labels most probable; 1.0 without labels or where none is better.

    Args:
        logits (`torch.Tensor` of shape `(n, draft_vocab)`, floating point): The drafter's at one depth.
        labels (`torch.LongTensor` of shape `(n,)`): Draft-vocabulary indices of what came, -100 for other tokens.

    ValueError: Logits hold NaN or +inf, or exclude a label.
    """

    def loss(log_temperature: float) -> float:
        rows = zip(logits.split(256), labels.split(256))  # so that copies stay small beside the logits
        scale = math.exp(-log_temperature)
        return sum(F.cross_entropy(row.float() * scale, label, reduction="sum").item() for row, label in rows)

    unscaled, low, high = loss(0.0), math.log(0.25), math.log(4.0)
    if not math.isfinite(unscaled):
        raise ValueError("No temperature can be fitted: logits hold NaN or +inf, or exclude a label.")
    while high - low > 0.005:  # the loss is convex in 1 / T, so the worse of two inner points bounds its minimum
        third = (high - low) / 3
        if loss(low + third) <= loss(high - third):
            high -= third
        else:
            low += third
    best = (low + high) / 2
    return math.exp(best) if loss(best) < unscaled else 1.0
