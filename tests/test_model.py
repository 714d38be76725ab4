"""The drafter itself: slots, the attention rule, train/decode equality, checkpoints in the format that vLLM reads."""

import re

import pytest
import torch
from conftest import ROOT, make_drafter, prompt_of
from transformers import DynamicCache

import modeling_peagle
from configuration_peagle import default_layer_ids
from modeling_peagle import fit_width, slot_layout, slot_visibility


DEPTHS = 4


def features_of(target, drafter, tokens):
    states = target(tokens[None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i] for i in drafter.config.eagle_aux_hidden_state_layer_ids], dim=-1)


def all_slots(tokens: int, depths: int = DEPTHS):
    """Every (anchor, depth) whose token exists, by depth."""
    pairs = [(a, d) for d in range(depths) for a in range(tokens - 1)]
    return torch.tensor([a for a, _ in pairs]), torch.tensor([d for _, d in pairs])


def training_logits(target, drafter, tokens, anchor, depth, visible=None):
    slot_ids, feature_index, positions = slot_layout(
        tokens, torch.arange(len(tokens)), anchor, depth, drafter.config.mask_token_id
    )
    if visible is None:
        visible = slot_visibility(anchor[:, None], depth[:, None], anchor, depth)
    output = drafter(
        slot_ids[None],
        features_of(target, drafter, tokens),
        feature_index[None],
        positions[None],
        visible[None],
        embedding=target.get_input_embeddings().weight,
    )
    return output.logits[0]


# Slots and what they see


def test_slot_layout_gives_tokens_features_and_positions():
    ids, positions = torch.tensor([10, 11, 12, 20, 21]), torch.tensor([0, 1, 2, 0, 1])
    anchor, depth = torch.tensor([0, 1, 3, 1, 1, 3]), torch.tensor([0, 0, 0, 1, 2, 1])
    slot_ids, feature_index, slot_positions = slot_layout(ids, positions, anchor, depth, mask_token_id=7)
    assert slot_ids.tolist() == [11, 12, 21, 7, 7, 7]
    assert feature_index.tolist() == [1, 2, 4, 0, 0, 0]
    assert slot_positions.tolist() == [0, 1, 0, 2, 3, 1]


def test_slot_visibility_is_the_real_prefix_and_the_own_chain():
    for a in range(4):
        for d in range(3):
            for b in range(4):
                for e in range(3):
                    prefix, chain = e == 0 and b <= a, b == a and e <= d
                    seen = slot_visibility(*map(torch.tensor, (a, d, b, e)))
                    assert bool(seen) == (prefix or chain)


@pytest.mark.parametrize("layers", range(1, 81))
def test_layer_ids_are_distinct_and_valid_for_every_depth(layers):
    ids = default_layer_ids(layers)
    assert ids == sorted(set(ids)) and 0 <= ids[0] and ids[-1] < layers
    assert len(ids) == min(3, layers)
    if layers >= 7:
        assert ids == [2, layers // 2, layers - 3]


# Training and decoding are the same function


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_training_forward_equals_the_decoding_forward_at_every_anchor_and_depth(target, num_layers):
    drafter, tokens = make_drafter(target, num_hidden_layers=num_layers), prompt_of(12)[0]
    anchor, depth = all_slots(len(tokens))
    trained = training_logits(target, drafter, tokens, anchor, depth)
    features, table = features_of(target, drafter, tokens), target.get_input_embeddings().weight
    cache = DynamicCache(config=drafter.config)
    for a in range(len(tokens) - 1):  # one verified token at a time, the way decoding meets them
        decoded = drafter.draft(tokens[a : a + 2], features[:, a : a + 1], DEPTHS, cache, table)
        assert cache.get_seq_length() == a + 1
        for d in range(DEPTHS):
            row = trained[(anchor == a) & (depth == d)][0]
            torch.testing.assert_close(decoded[d], row, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fault", ["positions", "chain", "mask_hidden"])
def test_a_faulty_training_forward_differs_from_decoding(llama, fault):
    drafter, tokens = make_drafter(llama), prompt_of(12)[0]
    anchor, depth = all_slots(len(tokens))
    features, table = features_of(llama, drafter, tokens), llama.get_input_embeddings().weight
    decoded = drafter.draft(tokens, features[:, :-1], DEPTHS, DynamicCache(config=drafter.config), table)
    visible = slot_visibility(anchor[:, None], depth[:, None], anchor, depth)
    if fault == "chain":  # slots see the mask slots of other anchors
        visible = anchor[None] <= anchor[:, None]
    if fault == "mask_hidden":
        drafter.mask_hidden.data.neg_()
    if fault == "positions":  # every slot of a chain at the anchor's own position
        slot_ids, feature_index, _ = slot_layout(tokens, torch.arange(12), anchor, depth, 5)
        slots = slot_ids[None], features, feature_index[None], anchor[None], visible[None]
        trained = drafter(*slots, embedding=table).logits[0]
    else:
        trained = training_logits(llama, drafter, tokens, anchor, depth, visible)
    last = trained[anchor == len(tokens) - 2]
    assert (last[1:] - decoded[1:]).abs().max() > 1e-4  # equality is tested to 1e-5


def test_a_prompt_read_at_once_equals_one_read_in_parts(llama):
    drafter, tokens = make_drafter(llama, num_hidden_layers=2), prompt_of(15)[0]
    features, table = features_of(llama, drafter, tokens), llama.get_input_embeddings().weight
    whole = drafter.draft(tokens, features[:, :14], DEPTHS, DynamicCache(config=drafter.config), table)
    cache, start = DynamicCache(config=drafter.config), 0
    for end in (3, 4, 9, 14):
        parts = drafter.draft(tokens[start : end + 1], features[:, start:end], DEPTHS, cache, table)
        start = end
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


def test_a_long_prompt_is_read_in_pieces(llama, monkeypatch):
    drafter, tokens = make_drafter(llama, num_hidden_layers=2), prompt_of(15)[0]
    arguments = tokens, features_of(llama, drafter, tokens)[:, :14], DEPTHS
    results = []
    for size in (1024, 14, 5, 1):
        monkeypatch.setattr(modeling_peagle.Drafter, "max_slots", size)
        cache, widest = DynamicCache(config=drafter.config), []
        hook = drafter.register_forward_pre_hook(lambda _, inputs: widest.append(inputs[0].shape[1]))  # noqa: B023
        results.append(drafter.draft(*arguments, cache, llama.get_input_embeddings().weight))
        hook.remove()
        assert cache.get_seq_length() == 14 and max(widest) <= min(size, 14) + DEPTHS - 1
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=1e-5)


def test_packed_documents_equal_separate_ones(llama):
    drafter, documents = make_drafter(llama, num_hidden_layers=2), [prompt_of(7)[0], prompt_of(11)[0]]
    separate = [training_logits(llama, drafter, tokens, *all_slots(len(tokens))) for tokens in documents]
    tokens, offsets = torch.cat(documents), [0, 7]
    parts = [all_slots(len(document)) for document in documents]
    anchor = torch.cat([a + offset for (a, _), offset in zip(parts, offsets)])
    depth = torch.cat([d for _, d in parts])
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    slot_ids, feature_index, slot_positions = slot_layout(tokens, positions, anchor, depth, 5)
    features = torch.cat([features_of(llama, drafter, document) for document in documents], dim=1)
    document = (anchor >= 7).long()
    rule = slot_visibility(anchor[:, None], depth[:, None], anchor, depth)
    for isolated in (True, False):
        visible = rule & (document[:, None] == document) if isolated else rule
        packed = drafter(
            slot_ids[None],
            features,
            feature_index[None],
            slot_positions[None],
            visible[None],
            embedding=llama.get_input_embeddings().weight,
        ).logits[0]
        error = (packed - torch.cat(separate)).abs().max()
        assert (error < 1e-5) == isolated


def test_eager_attention_equals_sdpa(llama):
    drafter, tokens = make_drafter(llama), prompt_of(9)[0]
    slots = all_slots(len(tokens))
    sdpa = training_logits(llama, drafter, tokens, *slots)
    drafter.set_attn_implementation("eager")
    torch.testing.assert_close(training_logits(llama, drafter, tokens, *slots), sdpa, atol=1e-5, rtol=1e-5)


def test_the_order_of_slots_does_not_matter(llama):
    drafter, tokens = make_drafter(llama), prompt_of(9)[0]
    anchor, depth = all_slots(len(tokens))
    order = torch.randperm(len(anchor))
    straight = training_logits(llama, drafter, tokens, anchor, depth)
    shuffled = training_logits(llama, drafter, tokens, anchor[order], depth[order])
    torch.testing.assert_close(shuffled, straight[order], atol=1e-5, rtol=1e-5)


# Borrowed and own parts


def test_head_rows_and_draft_ids_come_from_the_target(llama):
    ids = torch.tensor([2, 3, 11, 40, 77, 100])
    drafter = make_drafter(llama, draft_ids=ids)
    assert torch.equal(drafter.draft_ids(), ids)
    assert torch.equal(drafter.lm_head.weight, llama.lm_head.weight[ids])
    assert torch.equal(drafter.d2t + torch.arange(6), ids), "d2t holds offsets"


@pytest.mark.parametrize("width", [16, 32, 48])
def test_fitting_a_table_keeps_inner_products_as_well_as_the_width_allows(width):
    table = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    fitted = fit_width(table, width)
    assert fitted.shape == (50, width)
    gram, fitted_gram = table @ table.T, fitted @ fitted.T
    if width >= 32:
        torch.testing.assert_close(fitted_gram, gram, atol=1e-3, rtol=1e-4)
    else:  # the best approximation of this rank
        tail = torch.linalg.svdvals(table)[width:] ** 2
        assert torch.isclose((gram - fitted_gram).norm(), tail.norm(), rtol=1e-3)


def test_a_drafter_has_layers(llama):
    with pytest.raises(Exception, match="at least one layer"):  # wrapped by `@strict`
        make_drafter(llama, num_hidden_layers=0)


def test_the_modules_do_not_reach_into_the_data_package():
    source = "".join((ROOT / f"{name}_peagle.py").read_text() for name in ("modeling", "generation", "decoding"))
    assert not re.search(r"^\s*(from|import) data\b", source, re.MULTILINE)


@torch.no_grad()
def test_a_drafter_of_the_targets_last_layer_says_what_the_target_says(llama):
    """Given what enters that layer, and no more: then slot a scores the token after a."""
    drafter = make_drafter(llama, eagle_aux_hidden_state_layer_ids=[3], fc_norm=False)
    drafter.take_layers(llama)
    drafter.fc.weight.copy_(torch.eye(32))
    prompt = prompt_of(12)
    output = llama(prompt, output_hidden_states=True)
    ids, anchor = prompt[0], torch.arange(11)
    slot_ids, index, positions = slot_layout(ids, torch.arange(12), anchor, torch.zeros_like(anchor), 5)
    visible = anchor[:, None] >= anchor
    table = llama.get_input_embeddings().weight
    logits = drafter(
        slot_ids[None], output.hidden_states[3], index[None], positions[None], visible[None], table
    ).logits
    torch.testing.assert_close(logits, output.logits[:, :11], atol=1e-4, rtol=1e-4)
    scratch = make_drafter(llama, eagle_aux_hidden_state_layer_ids=[3], fc_norm=False)
    scratch.fc.weight.copy_(torch.eye(32))
    other = scratch(slot_ids[None], output.hidden_states[3], index[None], positions[None], visible[None], table).logits
    assert (other - output.logits[:, :11]).abs().max() > 0.1


def test_every_target_gives_what_fits_of_its_layers(target):
    drafter = make_drafter(target, num_hidden_layers=2)
    drafter.take_layers(target)
    gate = target.get_decoder().layers[-1].mlp.gate_proj.weight
    assert torch.equal(drafter.layers[1].mlp.gate_proj.weight, gate)
    assert not drafter.layers[0].self_attn.q_proj.weight[:, :32].any()
    norm = target.get_decoder().norm
    expected = norm(torch.eye(32))
    torch.testing.assert_close(drafter.norm(torch.eye(32)), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="99 layers"):
        make_drafter(target, num_hidden_layers=99).take_layers(target)
