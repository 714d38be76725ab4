"""The law of sampled output, by enumeration of every random outcome on toy targets given as tables."""

import itertools
import math

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

import generation_peagle
from generation_peagle import Continuation


class Undecided(Exception):
    """A script of random choices ended before the run did; `args[0]` is the number of next choices."""


def run_scripted(monkeypatch, script, rule, *arguments):
    """The tokens of one run whose random draws follow `script`, and the probability of these draws."""
    cursor, weights = iter(script), []

    def choose(probabilities, num_samples):
        probabilities = probabilities.flatten()
        choice = next(cursor, None)
        if choice is None:
            raise Undecided(len(probabilities))
        weights.append(probabilities[choice].item())
        return torch.tensor([[choice]])

    with monkeypatch.context() as patch:
        patch.setattr(generation_peagle.torch, "multinomial", choose)
        return rule(*arguments), math.prod(weights)


def enumerate_law(monkeypatch, rule, table, drafts_of, count):
    """The exact joint law of the first `count` tokens that a verifier emits, as `{tokens: probability}`: all scripts of
    random choices are tried."""
    law, pending = {}, [()]
    while pending:
        script = pending.pop()
        try:
            tokens, weight = run_scripted(monkeypatch, script, rule, table, drafts_of, count)
            law[tokens] = law.get(tokens, 0.0) + weight
        except Undecided as undecided:
            pending += [(*script, choice) for choice in range(undecided.args[0])]
    return law


def ours(table, drafts_of, count):
    """Rounds of our accept rule on a target given as a table `path -> logits`."""
    config = GenerationConfig(do_sample=True, max_length=1 + count)
    text = Continuation(
        torch.zeros((1, 1), dtype=torch.long),
        LogitsProcessorList(),
        StoppingCriteriaList([lambda ids, scores, **_: torch.tensor([ids.shape[1] > count])]),
        config,
        None,
    )
    while not text.stopped:
        path = tuple(text.sequence[0, 1:].tolist())
        drafts = drafts_of(path)
        logits = torch.stack([table[path + tuple(drafts[:i])] for i in range(len(drafts) + 1)])
        text.accept(logits, drafts)
    return tuple(text.sequence[0, 1:].tolist())


def skips_the_first_check(table, drafts_of, count):
    """A known fault: the first draft token is kept without asking the target."""
    tokens = ()
    while len(tokens) < count:
        tokens += (drafts_of(tokens)[0],)
        probabilities = table[tokens].softmax(-1)
        tokens += (torch.multinomial(probabilities[None], num_samples=1).item(),)
    return tokens[:count]


def toy():
    vocabulary, generator = 3, torch.Generator().manual_seed(0)
    paths = [p for n in range(7) for p in itertools.product(range(vocabulary), repeat=n)]
    table = {path: torch.randn(vocabulary, generator=generator, dtype=torch.float64) for path in paths}

    def drafts_of(path):  # a deterministic drafter, as ours is
        return [(sum(path) + 1) % vocabulary, (len(path) + 2) % vocabulary, 0]

    def law_of(count):
        law = {}
        for tokens in itertools.product(range(vocabulary), repeat=count):
            weight = 1.0
            for i, token in enumerate(tokens):
                weight *= table[tokens[:i]].softmax(-1)[token].item()
            law[tokens] = weight
        return law

    return table, drafts_of, law_of


def total_variation(a, b):
    return sum(abs(a.get(key, 0) - b.get(key, 0)) for key in a.keys() | b.keys()) / 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sampled_output_has_exactly_the_law_of_the_target(monkeypatch, count):
    table, drafts_of, law_of = toy()
    law = enumerate_law(monkeypatch, ours, table, drafts_of, count)
    assert total_variation(law, law_of(count)) < 1e-12


def test_the_enumeration_catches_a_wrong_rule(monkeypatch):
    table, drafts_of, law_of = toy()
    law = enumerate_law(monkeypatch, skips_the_first_check, table, drafts_of, 2)
    assert total_variation(law, law_of(2)) > 0.05
