"""The layers put out only what is read: the same scores, keys, values and gradients, for less work."""

from functools import partial

import pytest
import torch
from conftest import make_drafter
from test_segments import assert_same, drafter_of
from test_training import block, build_target, build_trainer, document
from transformers import DynamicCache

from layers_peagle import PEagleLayer, attend


def everything(monkeypatch):
    """As if every layer put out all slots, of which those that are read are picked afterwards."""
    put_out = PEagleLayer.put_out
    whole = lambda self, read, residual, rows, kwargs: put_out(self, read, residual, slice(None), kwargs)[:, rows]  # noqa: E731
    monkeypatch.setattr(PEagleLayer, "put_out", whole)


def slots_put_out(drafter, run):
    """How many slots the last layer puts out in `run`, and what that returns."""
    count = []
    hook = drafter.layers[-1].mlp.register_forward_pre_hook(lambda _, inputs: count.append(inputs[0].shape[1]))
    result = run()
    hook.remove()
    return sum(count), result


def arguments_of(drafter, target, length=12, cached=0):
    ids = torch.arange(6, 7 + length)
    slot_ids, index, positions, visible = drafter.slots(ids, length, cached, 3)
    features = torch.randn(1, length, drafter.config.num_features, generator=torch.Generator().manual_seed(0))
    return slot_ids[None], features, index[None], positions[None], visible[None], target.get_input_embeddings().weight


ROWS = [slice(-3, None), slice(0, 0), slice(None), torch.tensor([9, 2, 13, 4])]


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", ROWS, ids=["last", "none", "all", "some"])
@torch.no_grad()
def test_rows_score_what_they_do_among_all(llama, monkeypatch, layers, attention, rows):
    drafter = make_drafter(llama, num_hidden_layers=layers)
    drafter.set_attn_implementation(attention)
    found = []
    for _ in range(2):
        cache = DynamicCache()
        drafter(*arguments_of(drafter, llama), cache=cache, rows=slice(0, 0))
        cache.crop(-2)
        logits = drafter(*arguments_of(drafter, llama, cached=12), cache=cache, rows=rows).logits
        found.append((logits, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]))
        everything(monkeypatch)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert found[0][0].shape[1] == len(torch.arange(14)[rows])


@torch.no_grad()
def test_with_all_rows_the_attention_is_llamas(llama):
    attention = make_drafter(llama, num_hidden_layers=2).layers[1].self_attn
    states, mask = torch.randn(1, 9, 32), torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    tables = torch.randn(2, 1, 9, 8)
    theirs, _ = attention(states, tuple(tables), mask)
    ours = attend(attention, states, slice(None), tuple(tables), mask, None)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [1, 3, "markov"])
@pytest.mark.parametrize("segment_length", [9, 1000])
def test_what_is_learned_is_what_all_slots_together_would_learn(tmp_path, monkeypatch, kind, segment_length):
    target, learned = build_target(), []
    for _ in range(2):
        trainer = build_trainer(target, [], tmp_path, drafter=drafter_of(target, kind), segment_length=segment_length)
        row = trainer.data_collator([block(document(30, 1, prompt=14), document(8, 2), document(6, 3, supervised=0))])
        step = partial(trainer.training_step, trainer.model, row, num_items_in_batch=torch.tensor(10))
        count, loss = slots_put_out(trainer.model, step)
        learned.append(
            (loss, {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}, count)
        )
        everything(monkeypatch)
    assert_same(*learned)
    # Of the scored slots; without this rule of all, and once more of those that are read before they are learned.
    scored = int((row["labels"] != -100).sum())
    assert learned[0][2] == scored < row["labels"].numel() - 15 <= learned[1][2] - 15


@torch.no_grad()
def test_a_prompt_costs_its_keys_and_values(llama, monkeypatch):
    drafter, counts = make_drafter(llama), []
    ids, features = torch.arange(6, 87), torch.randn(1, 80, drafter.config.num_features)
    for _ in range(2):
        draft = partial(drafter.draft, ids, features, 4, DynamicCache(), llama.get_input_embeddings().weight)
        counts.append(slots_put_out(drafter, draft)[0])
        everything(monkeypatch)
    assert counts == [4, 83]
