"""From packed blocks to training rows: exact tensors, document edges and COD sampling against a definition in loops."""

import random

import pytest
import torch

from data.collator import PackingCollator, sample_slots


# Six tokens, three of them supervised in two turns, then four tokens, all but the first supervised.
FIRST = ([10, 11, 12, 13, 14, 15], [0, 0, 1, 1, 0, 1])
SECOND = ([20, 21, 22, 23], [0, 1, 1, 1])


def block(*documents):
    return {
        "input_ids": [token for ids, _ in documents for token in ids],
        "loss_mask": [kept for _, mask in documents for kept in mask],
        "seq_lengths": [len(ids) for ids, _ in documents],
    }


def collate(*blocks, num_depths=3, ratio=1.0, floor=0.0):
    return PackingCollator(num_depths, ratio, floor)(list(blocks))


def sample(masks, num_depths=4, ratio=1.0, floor=0.0):
    """`(loss_mask, document_ids, slots)` of documents given by their masks; slots are `(anchor, depth, is_scored)`."""
    loss_mask = torch.tensor([kept for mask in masks for kept in mask]).bool()
    document_ids = torch.tensor([i for i, mask in enumerate(masks) for _ in mask])
    anchor, depth, scored = sample_slots(loss_mask, document_ids, num_depths, ratio, floor)
    scored = set(scored.tolist())
    slots = [(a, d, i in scored) for i, (a, d) in enumerate(zip(anchor.tolist(), depth.tolist()))]
    return loss_mask, document_ids, slots


def every_slot(loss_mask, document_ids, num_depths):
    """The definition, token by token: depth-0 slots with a successor, and the complete supervised chains."""
    loss_mask, document_ids = loss_mask.tolist(), document_ids.tolist()
    slots = []
    for d in range(num_depths):
        for a in range(len(loss_mask)):
            mine = [i for i in range(len(loss_mask)) if document_ids[i] == document_ids[a]]
            scored = all(label in mine and loss_mask[label] for label in range(a + 2, a + 3 + d))
            if scored or (d == 0 and a + 1 in mine):
                slots.append((a, d, scored))
    return slots


def faults(loss_mask, document_ids, slots):
    """What may never be true of a sample, whatever was dropped from it."""
    tokens, held = len(loss_mask), {(a, d) for a, d, _ in slots}
    found = set()
    for a, d, scored in slots:
        if a < 0 or a + 1 >= tokens or (scored and a + 2 + d >= tokens):
            found.add("out of range")
            continue
        if document_ids[a] != document_ids[a + 1]:
            found.add("token half in another document")
        if scored and document_ids[a] != document_ids[a + 2 + d]:
            found.add("label in another document")
        if scored and not loss_mask[a + 2 + d]:
            found.add("label not supervised")
        if d and (a, d - 1) not in held:
            found.add("chain broken")
        if d and not scored:
            found.add("mask slot without a loss")
    if len(held) != len(slots):
        found.add("slot twice")
    return found


def random_masks(generator, documents=6, longest=14):
    return [
        [generator.random() < 0.75 for _ in range(generator.randint(1, longest))]
        for _ in range(generator.randint(1, documents))
    ]


def test_two_documents_give_exactly_these_token_tensors():
    row = collate(block(FIRST, SECOND))
    assert row["input_ids"].tolist() == [[10, 11, 12, 13, 14, 15, 20, 21, 22, 23]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]
    assert row["document_ids"].tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 1, 1]]
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == [0, 6, 10]
    assert row["max_length_q"] == row["max_length_k"] == 6


def test_two_documents_give_exactly_these_slots_and_labels():
    row = collate(block(FIRST, SECOND))
    slots = list(zip(row["anchor"].tolist(), row["depth"].tolist()))
    assert slots == [(a, 0) for a in (0, 1, 2, 3, 4, 6, 7, 8)] + [(0, 1), (6, 1)]
    assert row["labels"].tolist() == [[12, 13, -100, 15, -100, 22, 23, -100, 13, 23]]


def test_tensors_have_the_types_that_models_and_kernels_read():
    row = collate(block(FIRST, SECOND))
    for name in ("input_ids", "position_ids", "document_ids", "anchor", "depth", "labels"):
        assert row[name].dtype == torch.long, name
    assert row["cu_seq_lens_q"].dtype == torch.int32
    assert isinstance(row["max_length_q"], int)


def test_two_blocks_in_a_batch_are_one_block_of_both_documents():
    together, apart = collate(block(FIRST, SECOND)), collate(block(FIRST), block(SECOND))
    for name, value in together.items():
        assert torch.equal(torch.as_tensor(apart[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("convert", [list, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int8).numpy()])
def test_columns_may_be_lists_tensors_or_arrays(convert):
    plain = block(FIRST, SECOND)
    row = collate(plain | {name: convert(plain[name]) for name in ("input_ids", "loss_mask")})
    assert torch.equal(row["labels"], collate(plain)["labels"])
    assert row["input_ids"].dtype == torch.long


def test_a_batch_order_does_not_change_what_is_learned_from_a_document():
    one, other = collate(block(FIRST), block(SECOND)), collate(block(SECOND), block(FIRST))
    assert sorted(one["labels"][0].tolist()) == sorted(other["labels"][0].tolist())


@pytest.mark.parametrize("num_depths", [1, 2, 5])
@pytest.mark.parametrize("seed", range(20))
def test_ratio_1_keeps_every_slot_of_the_definition(seed, num_depths):
    loss_mask, document_ids, slots = sample(random_masks(random.Random(seed)), num_depths)
    assert slots == every_slot(loss_mask, document_ids, num_depths)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("ratio, floor", [(1.0, 0.0), (0.6, 0.0), (0.3, 0.5), (0.0, 0.0)])
def test_no_sample_has_a_fault_at_any_depth(seed, ratio, floor):
    torch.manual_seed(seed)
    loss_mask, document_ids, slots = sample(random_masks(random.Random(seed)), 6, ratio, floor)
    assert faults(loss_mask, document_ids, slots) == set()
    assert set(slots) <= set(every_slot(loss_mask, document_ids, 6))


def test_the_fault_finder_finds_shifted_labels_and_forgotten_documents():
    loss_mask, document_ids, slots = sample([[0, 0, 1, 1, 1], [1, 1, 1, 0, 1, 1]])
    assert "label not supervised" in faults(loss_mask, document_ids, [(a - 1, d, s) for a, d, s in slots])
    one_document = every_slot(loss_mask, torch.zeros_like(document_ids), 4)
    assert "label in another document" in faults(loss_mask, document_ids, one_document)
    assert "chain broken" in faults(loss_mask, document_ids, [slot for slot in slots if slot[1] != 1])


@pytest.mark.parametrize("prompt_length", [2, 3, 7])
def test_the_first_assistant_token_after_the_prompt_is_trained_at_depth_0(prompt_length):
    _, _, slots = sample([[1, 1, 1], [0] * prompt_length + [1] * 5])
    first = 3 + prompt_length
    assert [(a, d) for a, d, scored in slots if scored and a + 2 + d == first] == [(first - 2, 0)]


def test_the_last_assistant_token_is_trained_at_every_depth_and_nothing_after_it_is():
    _, _, slots = sample([[0, 0, 1, 1, 1, 1, 1, 0, 0]], num_depths=3)
    assert {d for a, d, scored in slots if scored and a + 2 + d == 6} == {0, 1, 2}
    assert max(a + 2 + d for a, d, scored in slots if scored) == 6


def test_a_chain_ends_where_the_next_turn_is_not_supervised_and_does_not_resume_after_it():
    # Anchor 1 predicts token 3 (supervised), then 4 (not), then 5 and 6 (supervised again).
    _, _, slots = sample([[0, 0, 1, 1, 0, 1, 1]])
    assert [d for a, d, scored in slots if a == 1 and scored] == [0]
    assert [d for a, d, scored in slots if a == 0 and scored] == [0, 1]
    assert [d for a, d, scored in slots if a == 2 and scored] == []


def test_a_supervised_first_token_of_a_document_is_never_a_label():
    _, _, slots = sample([[1, 1, 1, 1], [1, 1, 1, 1]])
    labels = {a + 2 + d for a, d, scored in slots if scored}
    assert labels == {2, 3, 6, 7}  # nothing real precedes tokens 0 and 4 by two places in their document
    assert min(a for a, _, _ in slots) == 0


@pytest.mark.parametrize("masks", [[[1]], [[1], [1], [1]], [[1, 1]], [[1, 1], [1]]])
def test_documents_too_short_for_a_label_give_context_at_most(masks):
    _, _, slots = sample(masks)
    assert not any(scored for _, _, scored in slots)
    assert len(slots) == sum(len(mask) - 1 for mask in masks)


def test_a_block_with_nothing_supervised_gives_no_rows_but_its_context():
    row = collate(block(([1, 2, 3, 4], [0, 0, 0, 0])))
    assert row["labels"].tolist() == [[-100, -100, -100]]
    assert row["anchor"].tolist() == [0, 1, 2] and row["depth"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_all_slots_of_depth_0_stay_as_context_supervised_or_not(ratio):
    _, _, slots = sample([[0, 0, 0, 1, 1], [0, 1, 0, 0]], ratio=ratio)
    assert [a for a, d, _ in slots if d == 0] == [0, 1, 2, 3, 5, 6, 7]


def test_slots_are_ordered_by_depth_then_anchor():
    _, _, slots = sample([[1] * 30, [1] * 20], ratio=0.7)
    order = [(d, a) for a, d, _ in slots]
    assert order == sorted(order)


@pytest.mark.parametrize("ratio, floor", [(0.5, 0.0), (0.8, 0.2), (0.7, 0.2)])
def test_each_depth_keeps_its_share_of_the_candidates(ratio, floor):
    torch.manual_seed(0)
    _, _, slots = sample([[1] * 402], 5, ratio, floor)
    for d in range(5):
        candidates = 400 - d
        assert sum(depth == d and scored for _, depth, scored in slots) == round(candidates * max(ratio**d, floor))


def test_the_floor_keeps_deep_slots_that_the_ratio_alone_would_drop():
    torch.manual_seed(0)
    masks = [[1] * 202] * 2
    deep = {floor: sum(d == 7 for _, d, _ in sample(masks, 8, 0.5, floor)[2]) for floor in (0.0, 0.25)}
    assert deep[0.0] == round(2 * 193 * 0.5**7)
    # Chains that reach their document's end are lost on the way, so the share is the floor's or a little below.
    assert 0.9 * 0.25 * 386 <= deep[0.25] <= round(0.25 * 386)


def test_the_sample_follows_the_seed_and_differs_between_calls():
    torch.manual_seed(3)
    one, next_one = (sample([[1] * 60], ratio=0.5)[2] for _ in range(2))
    torch.manual_seed(3)
    assert sample([[1] * 60], ratio=0.5)[2] == one != next_one


def test_sampling_favours_no_place_of_a_document():
    torch.manual_seed(0)
    counts = torch.zeros(41)
    for _ in range(400):
        for a, d, _ in sample([[1] * 42], 2, 0.5)[2]:
            counts[a] += d == 1
    # 39 candidates kept with probability 1/2; five standard deviations of 400 draws are 50.
    assert counts[39:].sum() == 0
    assert (counts[:39] - 200).abs().max() < 50
