"""The laws that a tree is drawn from: what the drafter proposes at every depth, and how that is calibrated."""

import math
import random

import numpy as np
import pytest
import torch
from test_tree import token_paths

from tree_peagle import SMALL, DraftTree, best_first, candidates, fit_temperature, static_tree, top


# The laws


@pytest.mark.parametrize("vocab", [5, 4096, SMALL - 1, SMALL, SMALL + 17])
@pytest.mark.parametrize("num", [1, 5])
def test_top_equals_topk(vocab, num):
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[0, -1] = 9.0  # behind the last whole chunk, if there is a rest
    logits[1, -num:] = torch.arange(num) + 9.0
    logits[2] = -math.inf
    logits[2, 0] = 0.0
    values, indices = top(logits, num)
    assert torch.equal(values, logits.topk(num).values)
    assert torch.equal(logits.gather(1, indices), values)
    assert all(len(set(row)) == num for row in indices.tolist())


@pytest.mark.parametrize("temperatures", [None, [0.5, 1.0, 2.5]])
@pytest.mark.parametrize("vocab", [40, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_independent_laws_are_the_softmax(vocab, temperatures, dtype):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=generator).mul(3).to(dtype)
    before, draft_ids = logits.clone(), torch.randperm(9000, generator=generator)[:vocab]
    proposed = candidates(logits, 6, draft_ids, temperatures)
    assert torch.equal(logits, before)
    divisors = torch.tensor(temperatures or [1.0] * 3, dtype=torch.float64)[:, None]
    expected = (logits.double() / divisors).log_softmax(-1)
    values, indices = expected.topk(6)
    torch.testing.assert_close(torch.tensor(np.stack(proposed.log_probs))[:, 0].double(), values, atol=1e-5, rtol=1e-5)
    where = torch.full((9000,), -1).index_put((draft_ids,), torch.arange(vocab))
    chosen = where[torch.tensor(proposed.tokens)]
    torch.testing.assert_close(expected.gather(1, chosen), values)  # the same tokens, but for ties


@pytest.mark.parametrize("temperatures", [None, [0.5, 1.0, 2.5]])
def test_a_transition_biases_the_candidates_and_leaves_the_others_in_the_law(temperatures):
    generator = torch.Generator().manual_seed(0)
    logits, table = (torch.randn(n, 3000, generator=generator) * 2 for n in (3, 3000))
    proposed = candidates(
        logits, 4, None, temperatures, lambda previous, following: table[previous[..., None], following[:, None]]
    )
    assert torch.equal(torch.tensor(proposed.tokens), logits.topk(4).indices)
    assert [len(rows) for rows in proposed.log_probs] == [1, 4, 4]
    for depth in range(3):
        for row, law in enumerate(proposed.log_probs[depth]):
            biased = logits[depth].double()
            if depth:
                previous, following = proposed.tokens[depth - 1][row], proposed.tokens[depth]
                biased[following] += table[previous, following]
            expected = (biased / (temperatures[depth] if temperatures else 1)).log_softmax(-1)
            torch.testing.assert_close(
                torch.tensor(law).double(), expected[proposed.tokens[depth]], atol=1e-5, rtol=1e-5
            )


def test_a_small_tail_is_not_lost_in_rounding():
    logits = torch.tensor([[0.0, -1.0, -2.0], [30.0, 0.0, 1.0]])  # the tail of depth 1 is 4e-13 of the law
    proposed = candidates(logits, 1, transition=lambda previous, following: torch.full((1, 1, 1), -30.0))
    assert proposed.log_probs[1][0][0] == pytest.approx(-math.log(1 + 1 + math.e), rel=1e-5)
    assert (1 - logits[1].softmax(-1)[0]).item() == 0, "the difference would tell it, so this shows nothing"


def test_a_small_vocabulary_gives_all_it_has():
    proposed = candidates(torch.randn(2, 3), 8)
    assert [sorted(tokens) for tokens in proposed.tokens] == [[0, 1, 2]] * 2
    assert len(best_first(proposed, 100).tokens) == 3 + 9
    # All of the law is in the candidates, and rounding makes no path more probable than its beginning.
    assert np.exp(proposed.log_probs[1][0]).sum() == pytest.approx(1)
    certain = candidates(torch.tensor([[0.0, -math.inf]] * 3), 2)
    assert best_first(certain, 9) == DraftTree.chain([0, 0, 0])


def test_impossible_tokens_are_never_proposed():
    logits = torch.tensor([[1.0, -math.inf, 0.0, -math.inf], [-math.inf, 2.0, -math.inf, -math.inf]])
    assert token_paths(best_first(candidates(logits, 4), 99)) == [(0,), (0, 1), (2,), (2, 1)]
    shape = [(0,), (1,), (2,), (3,), (0, 0), (1, 0), (2, 0), (1, 1)]
    assert token_paths(static_tree(shape, candidates(logits, 4))) == [(0,), (2,), (0, 1), (2, 1)]

    def forbidding(previous, following):  # token 1 after 0
        return torch.where((previous[..., None] == 0) & (following[:, None] == 1), -math.inf, 0.0)

    allowed = candidates(torch.zeros(2, 2), 2, transition=forbidding)
    assert set(token_paths(best_first(allowed, 99))) == {(0,), (1,), (0, 0), (1, 0), (1, 1)}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("vocab", "place"), [(7, 3), (SMALL + 4, 2000), (SMALL + 4, SMALL + 3)])
def test_a_broken_drafter_is_refused(value, vocab, place):
    logits = torch.randn(3, vocab)
    candidates(logits, 4)
    logits[2, place] = value
    with pytest.raises(ValueError, match="NaN or \\+inf"):
        candidates(logits, 4)


def test_what_gives_no_law_is_refused():
    with pytest.raises(ValueError, match="exclude every token"):
        candidates(torch.full((1, 9), -math.inf), 2)
    for temperatures in ([1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan]):
        with pytest.raises(ValueError, match="2 depths need as many positive temperatures"):
            candidates(torch.zeros(2, 9), 2, temperatures=temperatures)


def test_temperatures_of_depths_that_are_not_drafted_do_not_matter():
    logits = torch.randn(2, 9)
    more, fewer = (candidates(logits, 3, None, temperatures) for temperatures in ([2.0, 0.5, 3.0], [2.0, 0.5]))
    assert best_first(more, 9) == best_first(fewer, 9)


# Calibration


def drawn(temperature, n=20_000, vocab=30):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, vocab, generator=generator) * 2
    return logits, torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("temperature", [0.4, 1.0, 1.8, 3.0])
def test_the_temperature_that_labels_were_drawn_with_is_found(temperature):
    logits, labels = drawn(temperature)
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(temperature, rel=0.05)
    labels[::3] = -100
    logits[::3] *= 50  # rows without a label do not count
    assert fit_temperature(logits, labels) == pytest.approx(temperature, rel=0.05)
    assert fit_temperature(logits, labels) == fit_temperature(logits.double(), labels)


def test_the_temperature_stays_in_its_range():
    logits, labels = drawn(1.0, 2000)
    assert fit_temperature(logits, torch.randint(30, (2000,))) == pytest.approx(4, rel=0.01)
    assert fit_temperature(logits, logits.argmax(-1)) == pytest.approx(0.25, rel=0.01)


def test_without_labels_or_preference_the_temperature_is_one():
    logits, labels = drawn(1.0, 9)
    assert fit_temperature(logits, torch.full_like(labels, -100)) == 1.0
    assert fit_temperature(logits[:0], labels[:0]) == 1.0
    assert fit_temperature(torch.zeros(9, 30), labels) == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_cannot_be_fitted_are_refused(value):
    logits, labels = drawn(1.0, 9)
    logits[4, (labels[4] + 1) % 30] = -math.inf  # what is excluded and does not come is fine
    fit_temperature(logits, labels)
    logits[4, labels[4]] = value
    with pytest.raises(ValueError, match="No temperature can be fitted"):
        fit_temperature(logits, labels)


def test_calibrated_laws_predict_what_is_accepted():
    """An overconfident drafter promises more than the target keeps; with the fitted temperature it promises what it keeps."""
    logits, labels = drawn(2.0, 4000)
    fitted = fit_temperature(logits, labels)
    rng = random.Random(0)
    rows = rng.sample(range(4000), 1000)
    promised = {1.0: 0.0, fitted: 0.0}
    kept = 0
    for row in rows:
        for temperature in promised:
            tree = best_first(candidates(logits[row, None], 3, temperatures=[temperature]), 3)
            promised[temperature] += tree.expected_accepted
        kept += labels[row].item() in tree.tokens
    assert promised[fitted] == pytest.approx(kept, rel=0.06)
    assert promised[1.0] > 1.15 * kept
