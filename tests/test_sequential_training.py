"""EAGLE-3's training-time test: loss, gradients and what is learned are those of drafting one token after the other.

That segments change nothing is tested in `test_segments.py`, with the other kinds of drafters.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_segments import assert_same, learn
from test_sequential import by_definition
from test_train_command import arguments_for, workplace  # noqa: F401
from test_training import DEPTHS, block, build_drafter, build_target, build_trainer, decode, document

from losses_peagle import LOSSES
from modeling_peagle import PEagleModel
from modeling_peagle_sequential import best
from train_peagle import main


@pytest.fixture(scope="module")
def target():
    return build_target()


@pytest.mark.parametrize("norm_output", [False, True])
def test_loss_and_gradients_are_those_of_the_loop_of_eagle3(target, tmp_path, norm_output):
    ids, mask = document(14, 1)
    drafter = build_drafter(target, draft_ids=None, parallel_drafting=False, norm_output=norm_output)
    trainer = build_trainer(target, [], tmp_path, drafter=drafter, segment_length=5)
    row = trainer.data_collator([block((ids, mask))])
    features, hidden = trainer.signals(row)

    def gradients():
        return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.requires_grad}

    def by_the_loop(**options):
        drafter.zero_grad()
        total = torch.zeros(())
        for anchor in range(len(ids) - 2):
            chain = torch.tensor(ids[anchor + 2 : anchor + 1 + DEPTHS])
            scores = by_definition(drafter, trainer.embedding, torch.tensor(ids), features, anchor, chain, **options)
            for depth, logits in enumerate(scores):
                places = range(anchor + 2, anchor + 3 + depth)
                if places[-1] < len(ids) and all(mask[i] for i in places):
                    teacher = trainer.signals.distribution(hidden[0, [anchor + 1 + depth]])
                    total = total + LOSSES["kl"](logits[None], teacher, None)[0]
        total.backward()
        return total.detach(), gradients()

    loss = trainer.training_step(drafter, row, num_items_in_batch=torch.tensor(1))
    ours, expected = (loss, gradients()), by_the_loop()
    assert_same(ours, expected)
    without_chain = by_the_loop(feed=torch.Tensor.detach)
    torch.testing.assert_close(without_chain[0], loss, atol=1e-4, rtol=1e-5)
    with pytest.raises(AssertionError):
        assert_same(ours, without_chain)


def test_there_is_no_mask_slot_to_learn(target, tmp_path):
    _, gradients = learn(target, tmp_path, document(15, 3), kind="sequential")
    assert "mask_hidden" not in gradients and all(gradient.any() for gradient in gradients.values())


@pytest.fixture(scope="module")
def by_heart(tmp_path_factory):
    """A target, a prompt, its greedy answer, and a sequential drafter trained on nothing else."""
    target, prompt = build_target(seed=2), torch.randint(3, 60, (1, 8))
    sequence = target.generate(prompt, max_new_tokens=40, do_sample=False)
    drafter = build_drafter(target, draft_ids=None, parallel_drafting=False)
    sample = [block((sequence[0].tolist(), [0] * 8 + [1] * 40))]
    # By its tokens, as the target's own law has near ties here.
    options = {"max_steps": 250, "learning_rate": 6e-3, "lr_scheduler_type": "cosine", "loss": "ce"}
    build_trainer(target, sample, tmp_path_factory.mktemp("by_heart"), drafter=drafter, keep=True, **options).train()
    return SimpleNamespace(target=target, prompt=prompt, sequence=sequence, drafter=drafter.eval())


def test_a_sample_learned_by_heart_is_accepted_at_every_depth(by_heart):
    sequence, acceptance = decode(by_heart)
    assert torch.equal(sequence, by_heart.sequence)
    assert min(acceptance) > 0.95, acceptance


def another(scores):
    return (best(scores) + 1) % scores.shape[-1]


def test_reading_on_from_another_token_the_same_drafter_is_accepted_clearly_less(by_heart, monkeypatch):
    draft = by_heart.drafter.draft
    monkeypatch.setattr(by_heart.drafter, "draft", lambda *args: draft(*args[:5], another))
    sequence, acceptance = decode(by_heart)
    assert torch.equal(sequence, by_heart.sequence)
    assert acceptance[0] > 0.95 and max(acceptance[1:]) < 0.5, acceptance


def test_the_command_trains_one(workplace, tmp_path):  # noqa: F811
    arguments = arguments_for(workplace, tmp_path, parallel_drafting=False, max_steps=2)
    main(arguments)
    drafter = PEagleModel.from_pretrained(tmp_path)
    assert not drafter.config.parallel_drafting and drafter.config.mask_token_id is None
    assert "mask_hidden" not in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "option", [{"markov_rank": 4}, {"mask_token_id": 3}, {"embeddings": "mask_row"}, {"drafter_model": "some/model"}]
)
def test_what_belongs_to_mask_slots_is_refused(workplace, tmp_path, option):  # noqa: F811
    with pytest.raises(ValueError, match=f"--{[*option][0]}.*is for drafting in parallel"):
        arguments_for(workplace, tmp_path, parallel_drafting=False, **option)
