# ruff: noqa: F401, F811 (the table is a fixture that is imported)
"""The law of sampled chains that are drawn from the drafter's law, by enumeration of every random outcome.

The drafts are as many as decoding makes: the last token of a text needs none.
"""

import functools
from dataclasses import replace

import pytest
import torch
from test_accept_law import VOCABULARY, by, enumerate_law, law_of, nothing, one_round, ours, table, total_variation
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import verification_peagle
from configuration_peagle import PEagleConfig
from decoding_peagle import Draws, draw_chain
from modeling_peagle import PEagleModel
from verification_peagle import Continuation, draw


FULL, PART = list(range(VOCABULARY)), [0, 2]
DRAFTERS = {  # draft vocabulary, Markov rank, token that is impossible at every depth, depth without a law
    "full": (FULL, 0, None, None),
    "part": (PART, 0, None, None),
    "one token": ([1], 0, None, None),
    "impossible": (FULL, 0, 1, None),
    "markov": (FULL, 2, None, None),
    "markov, part": (PART, 2, None, None),
    "no law": (FULL, 0, None, 0),
    "no law, markov": (FULL, 2, None, 1),
}


@functools.cache
def make_drafter(markov_rank):
    sizes = {"hidden_size": 8, "target_hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "target_num_hidden_layers": 4}
    ids = {"vocab_size": VOCABULARY, "mask_token_id": 2, "eagle_aux_hidden_state_layer_ids": [1, 2]}
    drafter = PEagleModel(PEagleConfig(**sizes, **heads, **ids, markov_rank=markov_rank)).double()
    if markov_rank:
        torch.manual_seed(1)
        for parameter in drafter.markov_head.parameters():
            torch.nn.init.normal_(parameter)
    return drafter.requires_grad_(False)


def drafter_logits(path, num_tokens, kind):
    ids, _, impossible, lawless = DRAFTERS[kind]
    generator = torch.Generator().manual_seed(1000 + sum((token + 1) * 4**i for i, token in enumerate(path)))
    logits = 1.5 * torch.randn(3, VOCABULARY, generator=generator, dtype=torch.float64)[:num_tokens, ids]
    if impossible is not None:
        logits[:, impossible] = -torch.inf
    if lawless is not None:
        logits[lawless : lawless + 1, 1] = torch.nan
    return logits


def drawn(kind, num_tokens, count, warpers=()):
    """Chains of at most `num_tokens`, for texts of `count` tokens."""

    def chain_of(path):
        logits = drafter_logits(path, min(num_tokens, count - 1 - len(path)), kind)
        if not len(logits):
            return nothing(path)
        ids, markov_rank, *_ = DRAFTERS[kind]
        pick = Draws(LogitsProcessorList(warpers), len(ids))
        return draw_chain(make_drafter(markov_rank), logits, torch.tensor(ids), pick)

    return chain_of


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize(("num_tokens", "count"), [(1, 2), (1, 3), (2, 3)])
def test_drawn_chains_have_exactly_the_law_of_the_target(monkeypatch, table, kind, num_tokens, count):
    law = enumerate_law(monkeypatch, ours, table, drawn(kind, num_tokens, count), count)
    assert total_variation(law, law_of(table, count)) < 1e-12


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_text_may_end_inside_a_drawn_chain(monkeypatch, table, kind):
    def ending(*arguments):
        return ours(*arguments, eos=1)

    law = enumerate_law(monkeypatch, ending, table, drawn(kind, 2, 3), 3)
    assert total_variation(law, law_of(table, 3, eos=1)) < 1e-12
    assert any(len(text) < 3 for text in law)


WARPED = [TemperatureLogitsWarper(0.6), TopKLogitsWarper(2)]
PROCESSED = {  # history; tokens that only the target rules out; what both warp
    "warped": WARPED,
    "history": [RepetitionPenaltyLogitsProcessor(1.8), *WARPED],
    "suppressed": [SuppressTokensLogitsProcessor([2]), *WARPED[:1]],
}


@pytest.mark.parametrize("kind", ["full", "part", "markov", "no law"])
@pytest.mark.parametrize("processors", PROCESSED.values(), ids=PROCESSED)
def test_processors_change_the_law_of_a_drawn_chain_by_its_own_history(monkeypatch, table, kind, processors):
    def processed(*arguments):
        return ours(*arguments, processors=processors)

    warpers = [processor for processor in processors if processor in WARPED]
    law = enumerate_law(monkeypatch, processed, table, drawn(kind, 2, 3, warpers), 3)
    assert total_variation(law, law_of(table, 3, by(processors))) < 1e-12
    assert total_variation(law, law_of(table, 3)) > 0.05


def test_drawn_chains_of_three(monkeypatch, table):
    def processed(*arguments):
        return ours(*arguments, processors=WARPED)

    chain = drawn("markov, part", 3, 4, WARPED)
    law = enumerate_law(monkeypatch, processed, table, lambda path: nothing(path) if path else chain(path), 4)
    assert total_variation(law, law_of(table, 4, by(WARPED))) < 1e-12


@pytest.mark.parametrize("kind", DRAFTERS)
def test_as_much_is_kept_as_the_laws_have_in_common(monkeypatch, table, kind):
    """On average `sum(min(p, q))` at each place: more than by the most probable drafts, which are kept by `p` alone."""

    def kept(table, tree_of, count):
        continuation = Continuation(
            torch.zeros((1, 1), dtype=torch.long),
            LogitsProcessorList(),
            StoppingCriteriaList([lambda ids, scores, **_: torch.tensor([False])]),
            GenerationConfig(do_sample=True),
            None,
        )
        return (one_round(continuation, table, tree_of),)

    law = enumerate_law(monkeypatch, kept, table, drawn(kind, 2, 3), 3)
    ids, markov_rank, *_ = DRAFTERS[kind]
    rows, drafter = drafter_logits((), 2, kind), make_drafter(markov_rank)

    def common(path, scores):
        q = scores.softmax(-1) if not scores.isnan().any() else scores.isnan().double()
        return torch.minimum(
            table[path].softmax(-1), torch.zeros(VOCABULARY).double().index_copy(0, torch.tensor(ids), q)
        )

    first, both = common((), rows[0]), 0.0
    for column, token in enumerate(ids):
        bias = drafter.markov_head(torch.tensor([column]))[0, : len(ids)] if markov_rank else 0.0
        both += first[token].item() * common((token,), rows[1] + bias).sum().item()
    assert law.get((1,), 0) + law.get((2,), 0) == pytest.approx(first.sum().item(), abs=1e-12)
    assert law.get((2,), 0) == pytest.approx(both, abs=1e-12)


def keep_by_the_target_alone(p, q, token):
    keep = p[token]
    return token if draw(torch.stack([keep, 1 - keep])) == 0 else draw((p - q).clamp(min=0))


def rejected_ones_drawn_anew(p, q, token):
    keep = (p[token] / q[token]).clamp(max=1)
    return token if draw(torch.stack([keep, 1 - keep])) == 0 else draw(p)


def rejected_ones_left_out(p, q, token):
    keep = (p[token] / q[token]).clamp(max=1)
    rest = p.index_fill(0, torch.tensor([token]), 0.0)
    return token if draw(torch.stack([keep, 1 - keep])) == 0 else draw(rest)


@pytest.mark.parametrize("rule", [keep_by_the_target_alone, rejected_ones_drawn_anew, rejected_ones_left_out])
@pytest.mark.parametrize("kind", ["full", "part", "markov"])
def test_the_enumeration_catches_a_wrong_ratio_test(monkeypatch, table, rule, kind):
    monkeypatch.setattr(verification_peagle, "ratio_test", rule)
    law = enumerate_law(monkeypatch, ours, table, drawn(kind, 1, 2), 2)
    assert sum(law.values()) == pytest.approx(1)
    assert total_variation(law, law_of(table, 2)) > 1e-3


def most_probable(tree):
    """The fault of assistants that draft the best tokens and give their scores as the law of a draw."""
    ids, laws = tree.laws
    return replace(tree, tokens=ids[laws.argmax(-1)].tolist())


def unprocessed(tree):
    ids, laws = tree.laws
    raw = laws ** WARPED[0].temperature  # as if the scores had not been divided by it
    return replace(tree, laws=(ids, raw / raw.sum(-1, keepdim=True)))


def of_another_depth(tree):
    ids, laws = tree.laws
    return replace(tree, laws=(ids, laws.roll(1, 0)))


@pytest.mark.parametrize("fault", [most_probable, unprocessed, of_another_depth])
def test_the_enumeration_catches_a_law_that_nothing_was_drawn_from(monkeypatch, table, fault):
    right = drawn("part", 2, 3, WARPED[:1])

    def wrong(path):
        tree = right(path)
        return fault(tree) if tree.tokens else tree

    law = enumerate_law(monkeypatch, ours, table, wrong, 3)
    assert sum(law.values()) == pytest.approx(1)
    assert total_variation(law, law_of(table, 3)) > 0.01


def test_the_enumeration_catches_a_history_that_ends_before_the_drafts(monkeypatch, table):
    processors, accept = PROCESSED["history"], Continuation.accept

    def forgetful(text, logits, tree):
        before, honest = text.sequence.clone(), text.logits_processor
        text.logits_processor = lambda ids, scores: honest(before, scores)
        accept(text, logits, tree)
        text.logits_processor = honest

    def processed(*arguments):
        return ours(*arguments, processors=processors)

    monkeypatch.setattr(Continuation, "accept", forgetful)
    law = enumerate_law(monkeypatch, processed, table, drawn("full", 2, 3, WARPED), 3)
    assert sum(law.values()) == pytest.approx(1)
    assert total_variation(law, law_of(table, 3, by(processors))) > 0.01


@pytest.mark.parametrize("rounding", [0.0, 1e-7])
def test_laws_that_differ_by_rounding_lose_no_token(rounding):
    """Where the ratio rejects although nothing of `p` is left: an event as improbable as rounding is large."""
    p = torch.tensor([0.2, 0.5, 0.3])
    q = p + rounding
    assert all(verification_peagle.ratio_test(p, q, token) in range(3) for token in range(3) for _ in range(50))
    torch.manual_seed(0)
    assert {verification_peagle.ratio_test(0 * p + p / 9, p, 0) for _ in range(200)} == {0, 1, 2}
