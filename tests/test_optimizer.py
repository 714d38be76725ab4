"""Muon moves the matrices of the layers, AdamW all else, each as if it were alone."""

import pytest
import torch
from test_backbone import BACKBONES, make_drafter
from test_training import BLOCKS, build_drafter, build_target, build_trainer, changed, state

from arguments_peagle import PEagleArguments
from optimizer_peagle import MuonWithAdamW, matrices_of


@pytest.fixture(scope="module")
def target():
    return build_target()


def names_of(drafter, parameters):
    return {name for name, parameter in drafter.named_parameters() if any(parameter is one for one in parameters)}


def test_the_matrices_are_those_of_the_layers(target):
    drafter = build_drafter(target, markov_rank=4, embeddings="trained")
    drafter.lm_head.weight.requires_grad_(True)
    found = names_of(drafter, matrices_of(drafter))
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"} < found
    left = names_of(drafter, set(drafter.parameters()) - set(matrices_of(drafter)))
    assert {"lm_head.weight", "embed_tokens.weight", "markov_head.given.weight", "markov_head.next.weight"} < left
    assert all(
        "norm" in name or "mask_hidden" in name or name.split(".")[0] in ("lm_head", "embed_tokens", "markov_head")
        for name in left
    )
    drafter.fc.weight.requires_grad_(False)
    assert "fc.weight" not in names_of(drafter, matrices_of(drafter))


@pytest.mark.parametrize("family", BACKBONES)
def test_of_a_backbone_they_are_those_of_the_layers_too(family):
    drafter = make_drafter(BACKBONES[family](), BACKBONES[family]())
    found = names_of(drafter, matrices_of(drafter))
    assert {"fc.weight"} < found and sum("self_attn" in name for name in found) == len(found) // 7 * 4
    assert not any("lm_head" in name or "embed" in name for name in found)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_each_part_moves_as_it_does_alone(target, weight_decay):
    """Three steps with gradients of our own against the two optimizers of torch, at rates that a schedule sets."""
    one, other = (build_drafter(target, markov_rank=4) for _ in range(2))
    other.load_state_dict(one.state_dict())
    adamw = torch.optim.AdamW(one.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=weight_decay)
    both = MuonWithAdamW(adamw, matrices_of(one), weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(both, lambda step: 1 / (1 + step))
    matrices = matrices_of(other)
    rest = [parameter for parameter in other.parameters() if all(parameter is not matrix for matrix in matrices)]
    alone = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=weight_decay),
    ]
    for step in range(3):
        torch.manual_seed(step)
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.clone()
        both.step()
        schedule.step()
        for optimizer in alone:
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.01 / (2 + step)
        assert changed(one.state_dict(), other.state_dict()) == set()
    both.zero_grad()
    assert all(parameter.grad is None for parameter in one.parameters())


def test_the_flag_changes_what_is_learned_and_not_what_is_frozen(target, tmp_path):
    trained = {}
    for muon in (False, True):
        drafter = build_drafter(target, markov_rank=4)
        trainer = build_trainer(target, BLOCKS, tmp_path, drafter=drafter, muon=muon, max_steps=2)
        trainer.train()
        trained[muon] = state(trainer)
        assert torch.equal(drafter.lm_head.weight, build_drafter(target).lm_head.weight)
    assert "fc.weight" in changed(trained[False], trained[True])


@pytest.mark.parametrize("other", [{"use_lora": True, "drafter_model": "some"}, {"optim": "sgd"}])
def test_what_muon_does_not_go_with_is_refused(other, tmp_path):
    with pytest.raises(ValueError, match="--muon moves whole matrices"):
        PEagleArguments(output_dir=str(tmp_path), train_file="some", use_cpu=True, muon=True, **other)
