"""The law of sampled output, by enumeration of every random outcome on toy targets given as tables."""

import itertools
import math

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import verification_peagle
from tree_peagle import DraftTree
from verification_peagle import Continuation, draw


class Undecided(Exception):
    """A script of random choices ended before the run did; `args[0]` lists the next choices that are possible."""


def run_scripted(monkeypatch, script, rule, *arguments):
    """The tokens of one run whose random draws follow `script`, and the probability of these draws."""
    cursor, weights = iter(script), []

    def choose(probabilities, num_samples):
        choices = []
        for law in probabilities.reshape(-1, probabilities.shape[-1]):
            choice = next(cursor, None)
            if choice is None:
                raise Undecided(law.nonzero().flatten().tolist())
            weights.append((law[choice] / law.sum()).item())
            choices.append([choice])
        return torch.tensor(choices if probabilities.dim() > 1 else choices[0])

    with monkeypatch.context() as patch:
        patch.setattr(verification_peagle.torch, "multinomial", choose)
        return rule(*arguments), math.prod(weights)


def enumerate_law(monkeypatch, rule, table, tree_of, count):
    """The exact joint law of the first `count` tokens that a verifier emits, as `{tokens: probability}`: all scripts of
    random choices are tried."""
    law, pending = {}, [()]
    while pending:
        script = pending.pop()
        try:
            tokens, weight = run_scripted(monkeypatch, script, rule, table, tree_of, count)
            law[tokens] = law.get(tokens, 0.0) + weight
        except Undecided as undecided:
            pending += [(*script, choice) for choice in undecided.args[0]]
    return law


def ours(table, tree_of, count, processors=(), eos=None):
    """Rounds of our accept rule on a target given as a table `path -> logits`."""

    def stop(ids, scores, **_):
        return torch.tensor([ids.shape[1] > count or ids[0, -1].item() == eos])

    text = Continuation(
        torch.zeros((1, 1), dtype=torch.long),
        LogitsProcessorList(processors),
        StoppingCriteriaList([stop]),
        GenerationConfig(do_sample=True, max_length=1 + count),
        None,
    )
    while not text.stopped:
        one_round(text, table, tree_of)
    return tuple(text.sequence[0, 1:].tolist())


def one_round(text, table, tree_of) -> int:
    path = tuple(text.sequence[0, 1:].tolist())
    tree = tree_of(path)
    nodes = [
        path + tuple(tree.tokens[node - 1] for node in tree.path(leaf)[1:]) for leaf in range(len(tree.tokens) + 1)
    ]
    return text.accept(torch.stack([table[node] for node in nodes]), tree)


# The toy: three tokens, logits drawn at random for every path.

VOCABULARY = 3


@pytest.fixture(scope="module")
def table():
    generator = torch.Generator().manual_seed(0)
    paths = [p for n in range(7) for p in itertools.product(range(VOCABULARY), repeat=n)]
    return {path: torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) for path in paths}


def law_of(table, count, process=lambda path, logits: logits, eos=None):
    """The target's own law of the first `count` tokens; with `eos` a text may be shorter."""
    law, pending = {}, [((), 1.0)]
    while pending:
        path, weight = pending.pop()
        if len(path) == count or path and path[-1] == eos:
            law[path] = weight
            continue
        probabilities = process(path, table[path]).softmax(-1).tolist()
        pending += [((*path, token), weight * p) for token, p in enumerate(probabilities) if p > 0]
    return law


def by(processors):
    def process(path, logits):
        ids, scores = torch.tensor([[0, *path]]), logits[None].clone()
        return LogitsProcessorList(processors)(ids, scores)[0]

    return process


def total_variation(a, b):
    return sum(abs(a.get(key, 0) - b.get(key, 0)) for key in a.keys() | b.keys()) / 2


def chain(path):  # deterministic drafters, as ours is
    return DraftTree.chain([(sum(path) + 1) % VOCABULARY, (len(path) + 2) % VOCABULARY, 0])


def tree(path):
    first, second = (sum(path) + 1) % VOCABULARY, len(path) % VOCABULARY
    tokens = [first, (first + 1) % VOCABULARY, second, (second + 2) % VOCABULARY, second, 1]
    return DraftTree(tokens, [0, 0, 1, 1, 2, 3], [0.0] * 6)


def all_tokens(path):
    return DraftTree([*range(VOCABULARY)] * 2, [0, 0, 0, 1, 1, 1], [0.0] * 6)


def nothing(path):
    return DraftTree.chain([])


SHAPES = {"chain": chain, "tree": tree, "all tokens": all_tokens, "nothing": nothing}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("tree_of", SHAPES.values(), ids=SHAPES)
def test_sampled_output_has_exactly_the_law_of_the_target(monkeypatch, table, tree_of, count):
    law = enumerate_law(monkeypatch, ours, table, tree_of, count)
    assert total_variation(law, law_of(table, count)) < 1e-12


@pytest.mark.parametrize("tree_of", SHAPES.values(), ids=SHAPES)
def test_a_text_may_end_inside_an_accepted_block(monkeypatch, table, tree_of):
    def ending(*arguments):
        return ours(*arguments, eos=1)

    law = enumerate_law(monkeypatch, ending, table, tree_of, 3)
    assert total_variation(law, law_of(table, 3, eos=1)) < 1e-12
    assert any(len(text) < 3 for text in law)


@pytest.mark.parametrize("tree_of", SHAPES.values(), ids=SHAPES)
def test_processors_change_the_law_of_every_path_by_its_own_history(monkeypatch, table, tree_of):
    """Temperature, a penalty on repetition, and the two most likely tokens only."""
    processors = [RepetitionPenaltyLogitsProcessor(1.8), TemperatureLogitsWarper(0.6), TopKLogitsWarper(2)]

    def processed(*arguments):
        return ours(*arguments, processors=processors)

    law = enumerate_law(monkeypatch, processed, table, tree_of, 3)
    assert total_variation(law, law_of(table, 3, by(processors))) < 1e-12
    assert total_variation(law, law_of(table, 3)) > 0.05


# Known faults. Each verifies two children of the root, and the enumeration has to see it.

DRAFTER = torch.tensor([0.55, 0.25, 0.15, 0.05], dtype=torch.float64)
ROOT = {(): torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()}


def ratio(p, q, token) -> bool:
    """The chance to keep a draft token that was drawn from `q`, taken."""
    accept = min(1.0, (p[token] / q[token]).item())
    return accept == 1 or draw(torch.tensor([accept, 1 - accept], dtype=torch.float64)) == 0


def residual(p, q):
    rest = (p - q).clamp(min=0)
    return rest / rest.sum()


def two_without_replacement():
    first = draw(DRAFTER)
    rest = DRAFTER.clone()
    rest[first] = 0
    return [first, draw(rest / rest.sum())]


def verify(table, children, renormalised: bool):
    """Recursive rejection of `children` in their order, as if they had been drawn from the drafter without replacement."""
    p, q = table[()].softmax(-1), DRAFTER.clone()
    for token in children:
        if ratio(p, q, token):
            return (token,)
        p = residual(p, q)
        if renormalised:
            q[token] = 0
            q = q / q.sum()
    return (draw(p),)


def right(table, tree_of, count):
    return verify(table, two_without_replacement(), renormalised=True)


def ratio_of_drafts_that_were_not_drawn(table, tree_of, count):
    return verify(table, DRAFTER.topk(2).indices.tolist(), renormalised=True)


def drafter_not_renormalised(table, tree_of, count):
    return verify(table, two_without_replacement(), renormalised=False)


def sorted_before_verifying(table, tree_of, count):
    return verify(
        table, sorted(two_without_replacement(), key=lambda token: -DRAFTER[token].item()), renormalised=True
    )


def improbable_ones_dropped(table, tree_of, count):
    return verify(table, [token for token in two_without_replacement() if DRAFTER[token] > 0.2], renormalised=True)


def one_draw_per_leaf(table, tree_of, count):
    """Every leaf draws its own token, and the first that agrees is kept."""
    p = table[()].softmax(-1)
    for leaf in (0, 1):
        token = draw(p)
        if token == leaf:
            return (token,)
    return (token,)


def first_check_skipped(table, tree_of, count):
    return (tree_of(()).tokens[0],)


def test_a_right_rule_of_another_kind_passes(monkeypatch):
    law = enumerate_law(monkeypatch, right, ROOT, chain, 1)
    assert total_variation(law, law_of(ROOT, 1)) < 1e-12


@pytest.mark.parametrize(
    "rule",
    [
        ratio_of_drafts_that_were_not_drawn,
        drafter_not_renormalised,
        sorted_before_verifying,
        improbable_ones_dropped,
        one_draw_per_leaf,
        first_check_skipped,
    ],
)
def test_the_enumeration_catches_a_wrong_rule(monkeypatch, rule):
    law = enumerate_law(monkeypatch, rule, ROOT, chain, 1)
    assert sum(law.values()) == pytest.approx(1)
    assert total_variation(law, law_of(ROOT, 1)) > 0.01
