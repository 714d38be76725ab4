"""Temperatures per depth: fitted to held-out texts, kept in the configuration, and used where trees are drafted."""

import math

import pytest
import torch
from conftest import make_drafter
from huggingface_hub.errors import StrictDataclassClassValidationError
from test_training import DEPTHS, VOCAB, block, build_drafter, build_target, build_trainer

import acceptance_peagle
from acceptance_peagle import Calibration
from configuration_peagle import PEagleConfig
from decoding_peagle import propose
from modeling_peagle import MarkovHead, PEagleModel


# The texts are draws of this law, token by token, so a drafter that always proposes it is as sure as it is right.
LAW = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(-1)


def texts(count, length=40):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.multinomial(LAW.exp(), length, replacement=True, generator=generator).tolist()
        yield block((ids, [0] * 3 + [1] * (length - 3)))


def lawful(target):
    """A drafter that proposes the law at the first depth. Behind it a Markov head adds the same again: twice the logits."""
    drafter = build_drafter(target, None)
    drafter.head = lambda hidden_states: LAW.expand(*hidden_states.shape[:-1], -1)
    drafter.config.markov_rank, drafter.markov_head = 1, MarkovHead(VOCAB, 1).requires_grad_(False)
    drafter.markov_head.given.weight.fill_(1.0)
    drafter.markov_head.next.weight.copy_(LAW[:, None])
    return drafter


def test_logits_that_are_twice_as_large_get_twice_the_temperature(tmp_path):
    target = build_target()
    drafter = lawful(target)
    trainer = build_trainer(target, [*texts(1)], tmp_path, drafter=drafter, eval_blocks=[*texts(30)])
    trainer.evaluate()
    trainer.calibration = Calibration(drafter.config)
    trainer.evaluate()
    assert [len(rows) for rows in trainer.calibration.rows] == [30 * (37 - depth) for depth in range(DEPTHS)]
    found = trainer.calibration.temperatures()
    assert found == pytest.approx([1.0] + [2.0] * (DEPTHS - 1), rel=0.06)

    def fault(temperatures):
        """Of the probabilities of the nodes, one or two tokens deep, all of which the law gives."""
        drafter.config.draft_temperatures = temperatures
        tree = propose(drafter, drafter.head(torch.empty(2, 1)), torch.arange(VOCAB), VOCAB)
        paths = [[tree.tokens[above - 1] for above in tree.path(node)[1:]] for node in range(1, VOCAB + 1)]
        assert {len(path) for path in paths} == {1, 2}
        return max(abs(tree.probability(node) - LAW[path].sum().exp().item()) for node, path in enumerate(paths, 1))

    assert fault(found) < 0.03 < 0.1 < fault(None)


def test_a_bounded_number_of_slots_is_kept_and_too_few_tell_nothing(monkeypatch):
    config = PEagleConfig(vocab_size=VOCAB, num_depths=2, speculation_depth=1)
    generator = torch.Generator().manual_seed(0)
    scores, depths = torch.randn(500, VOCAB, generator=generator), torch.tensor([0, 0, 0, 0, 1]).repeat(100)
    labels = scores.argmax(-1).where(torch.arange(500) % 3 > 0, -100)
    monkeypatch.setattr(acceptance_peagle, "MOST_ROWS", 200)
    calibration = Calibration(config)
    for part in range(0, 500, 50):
        calibration.add(*(rows[part : part + 50] for rows in (depths, scores, labels)))
    assert [len(rows) for rows in calibration.rows] == [200, 67]
    assert calibration.temperatures() == pytest.approx([0.25, 0.25], rel=0.01)  # always right
    calibration.rows[1] = calibration.rows[1][:63]
    assert calibration.temperatures()[1] == 1.0
    monkeypatch.setattr(acceptance_peagle, "MAX_SCORES", 2 * VOCAB * 90)
    assert Calibration(config).most == 90


def test_the_temperatures_stand_in_the_configuration(llama, tmp_path):
    temperatures = [0.5, 1.0, *[1.5] * 6]
    make_drafter(llama, draft_temperatures=temperatures).save_pretrained(tmp_path)
    assert PEagleModel.from_pretrained(tmp_path).config.draft_temperatures == temperatures
    assert make_drafter(llama).config.draft_temperatures is None
    for wrong in ([1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + [math.inf], [1.0] * 7 + [math.nan], [-1.0] * 8):
        with pytest.raises(StrictDataclassClassValidationError, match="draft_temperatures must be 8 positive numbers"):
            make_drafter(llama, draft_temperatures=wrong)
