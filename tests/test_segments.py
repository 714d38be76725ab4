"""Long texts are learned segment by segment, and the gradient is that of the whole; the losses; the sampled slots.

All models are tiny and random; float32 on the CPU.
"""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import make_target
from test_training import (
    BLOCKS,
    DRAFT_IDS,
    MASK,
    UNSUPERVISED,
    VOCAB,
    block,
    build_target,
    build_trainer,
    changed,
    document,
    state,
)
from transformers import DynamicCache

import modeling_peagle
import trainer_peagle
from configuration_peagle import PEagleBackboneConfig, PEagleConfig
from data.collator import sample_slots
from losses_peagle import DECAY, LK_RATE, LOSSES, WEIGHTS, Teacher, acceptance
from modeling_peagle import PEagleModel
from modeling_peagle_backbone import PEagleBackboneModel
from train_peagle import freeze
from trainer_peagle import cut_segments


@pytest.fixture(scope="module")
def target():
    return build_target()


KINDS = [3, "markov", "llama", "gemma3", "sequential"]


def drafter_of(target, kind):
    """A drafter of so many layers of its own (with a Markov head or sequential, of two), or of a backbone, whose features
    matter."""
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    shape = {"draft_vocab_size": len(DRAFT_IDS), "num_depths": 3, "speculation_depth": 3, "mask_token_id": MASK}
    if isinstance(kind, int) or kind in ("markov", "sequential"):
        torch.manual_seed(1)
        own = {"markov": {"markov_rank": 4}, "sequential": {"parallel_drafting": False}}
        shape |= {"num_hidden_layers": 2} | own[kind] if kind in own else {"num_hidden_layers": kind}
        config = PEagleConfig.for_target(target, tokenizer, **shape)
        drafter, embeddings = PEagleModel.from_target(target, config, DRAFT_IDS), "borrowed"
        if kind == "markov":
            torch.nn.init.normal_(drafter.markov_head.next.weight)
    else:
        backbone = make_target(kind)
        config = PEagleBackboneConfig.for_backbone(target, tokenizer, backbone, tokenizer, **shape)
        drafter, embeddings = PEagleBackboneModel.from_backbone(backbone, config, DRAFT_IDS), "mask_row"
        torch.nn.init.normal_(drafter.fc.weight, std=0.1)
    freeze(drafter, embeddings)
    return drafter


def learn(target, folder, *documents, kind=1, **options):
    """Loss and gradients of one packed row."""
    trainer = build_trainer(target, [], folder, drafter=drafter_of(target, kind), **options)
    row = trainer.data_collator([block(*documents)])
    loss = trainer.training_step(trainer.model, row, num_items_in_batch=torch.tensor(10))
    evaluated = trainer.compute_loss(trainer.model, row, num_items_in_batch=torch.tensor(10))
    torch.testing.assert_close(evaluated, loss, atol=1e-5, rtol=1e-5)
    return loss, {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same(one, other):
    torch.testing.assert_close(one[0], other[0], atol=1e-5, rtol=1e-5)
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], atol=1e-5 * gradient.abs().max(), rtol=1e-4, msg=name)


DOCUMENTS = {
    "one long": [document(40, 1)],
    "long among short": [document(7, 1), document(33, 2), document(5, 3), document(6, 4)],
    "supervised early": [(document(40, 1)[0], [0] * 4 + [1] * 6 + [0] * 30)],
    "supervised late": [(document(40, 1)[0], [0] * 36 + [1] * 4)],
}


@pytest.mark.parametrize("kind, loss", [*((3, loss) for loss in LOSSES), *((kind, "kl") for kind in KINDS[1:])])
@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_gradient_over_segments_is_that_of_the_whole(target, tmp_path, documents, kind, loss):
    options = {"kind": kind, "loss": loss, "depth_weights": "survival", "cod_ratio": 0.7}
    whole = learn(target, tmp_path, *documents, **options, segment_length=1000)
    for length in (2, 4, 11, 20, 39):
        assert_same(learn(target, tmp_path, *documents, **options, segment_length=length), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segment_length", [11, 1000])
def test_slots_that_pad_half_precision_change_nothing(target, tmp_path, monkeypatch, kind, segment_length):
    """Outside of `train` nothing is rounded to bfloat16, so that the sums can be compared."""
    lengths, padded = [], trainer_peagle.padded

    def watched(slots, multiple):
        lengths.append(padded(slots, multiple)["input_ids"].shape[1])
        return padded(slots, multiple)

    options = {"kind": kind, "depth_weights": "survival", "segment_length": segment_length}
    plain = learn(target, tmp_path, *DOCUMENTS["long among short"], **options)
    monkeypatch.setattr(trainer_peagle, "padded", watched)
    assert_same(learn(target, tmp_path, *DOCUMENTS["long among short"], **options, bf16=True), plain)
    trained = lengths[: len(lengths) // 2]  # the others are of the evaluation
    assert all(length % 64 == 0 for length in trained) == (kind != "sequential")


def test_without_what_later_segments_pass_on_the_gradient_would_be_another(target, tmp_path, monkeypatch):
    whole = learn(target, tmp_path, document(40, 1), segment_length=1000)
    made = trainer_peagle.keys_and_values
    monkeypatch.setattr(trainer_peagle, "keys_and_values", lambda cache: [tensor.detach() for tensor in made(cache)])
    wrong = learn(target, tmp_path, document(40, 1), segment_length=11)
    torch.testing.assert_close(wrong[0], whole[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError):
        assert_same(wrong, whole)


@pytest.mark.parametrize("kind, limit", [(1, ("FUSED_ROWS", 5)), ("llama", ("MAX_LOGITS", 5 * len(DRAFT_IDS)))])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_head_in_chunks_is_the_head_at_once(target, tmp_path, monkeypatch, kind, limit, loss):
    options = {"kind": kind, "loss": loss, "depth_weights": "survival"}
    whole = learn(target, tmp_path, *DOCUMENTS["long among short"], **options)
    calls, head = [], modeling_peagle.Drafter.head
    counted = lambda self, hidden: calls.append(len(hidden)) or head(self, hidden)  # noqa: E731
    monkeypatch.setattr(modeling_peagle.Drafter, "head", counted)
    monkeypatch.setattr(modeling_peagle, *limit)
    assert_same(learn(target, tmp_path, *DOCUMENTS["long among short"], **options), whole)
    assert max(calls) == 5


@pytest.mark.parametrize("loss", LOSSES)
def test_the_rest_learns_the_same_whether_the_head_is_frozen_or_not(target, tmp_path, loss):
    both = []
    for trained in (False, True):
        drafter = drafter_of(target, 2)
        drafter.lm_head.weight.requires_grad_(trained)
        trainer = build_trainer(target, [], tmp_path, drafter=drafter, loss=loss, depth_weights="decay")
        row = trainer.data_collator([block(*DOCUMENTS["long among short"])])
        value = trainer.training_step(trainer.model, row, num_items_in_batch=torch.tensor(10))
        both.append((value, {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}))
    assert set(both[1][1]) - set(both[0][1]) == {"lm_head.weight"}
    assert_same(*both)


def test_a_markov_head_says_nothing_at_the_start_and_learns(target, tmp_path):
    plain, markov = drafter_of(target, 2), drafter_of(target, "markov")
    fresh = PEagleModel(markov.config).state_dict()
    markov.load_state_dict(fresh | plain.state_dict())
    learned = []
    for drafter in (plain, markov):
        trainer = build_trainer(target, [], tmp_path, drafter=drafter)
        row = trainer.data_collator([block(*DOCUMENTS["one long"])])
        loss = trainer.training_step(trainer.model, row, num_items_in_batch=torch.tensor(10))
        learned.append((loss, {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad}))
    assert_same(*learned)
    assert learned[1][1]["markov_head.next.weight"].abs().max() > 0


def test_the_chain_follows_the_markov_head(target):
    drafter = drafter_of(target, "markov")
    logits = torch.randn(3, len(DRAFT_IDS))
    chain = drafter.choose(logits).tolist()
    bias = drafter.markov_head.next.weight @ drafter.markov_head.given.weight.T  # (next, given)
    assert chain[0] == logits[0].argmax()
    assert all(chain[d] == (logits[d] + bias[:, chain[d - 1]]).argmax() for d in (1, 2))
    assert any(
        (drafter_of(target, 2).choose(torch.roll(logits, i, 1)) != drafter.choose(torch.roll(logits, i, 1))).any()
        for i in range(5)
    )


def test_segments_cover_the_row_and_cut_only_what_is_too_long():
    rng = random.Random(0)
    for _ in range(200):
        lengths, size = [rng.randint(1, 30) for _ in range(rng.randint(1, 12))], rng.randint(1, 25)
        boundaries = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        groups = cut_segments(boundaries, size)
        ranges = [piece for pieces in groups for piece in pieces]
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == sum(lengths) and all(0 < stop - start <= size for start, stop in ranges)
        for pieces in groups:
            assert pieces[0][0] in boundaries and pieces[-1][1] in boundaries
            assert len(pieces) == 1 or pieces[0][0] == boundaries[boundaries.index(pieces[-1][1]) - 1]


@pytest.mark.parametrize("kind", KINDS[:-1])  # the other's tokens are picked: see `test_sequential_training.py`
@torch.no_grad()
def test_without_dropping_slots_the_loss_is_that_of_drafting_after_every_token(target, tmp_path, kind):
    """The rows of training against the very function that decodes, at each anchor of a text in segments."""
    drafter, (ids, mask) = drafter_of(target, kind), document(30, 1)
    trainer = build_trainer(target, [], tmp_path, drafter=drafter, segment_length=9)
    row = trainer.data_collator([block((ids, mask))])
    features, hidden = trainer.signals(row)
    total = 0
    for anchor in range(len(ids) - 2):
        cache = DynamicCache()
        logits = drafter.draft(
            row["input_ids"][0, : anchor + 2], features[:, : anchor + 1], 3, cache, trainer.embedding
        )
        for depth, scores in enumerate(logits):
            chain = range(anchor + 2, anchor + 3 + depth)
            if kind == "markov" and 0 < depth and chain[-1] < len(ids):
                scores = scores + drafter.markov_head(trainer.draft_label(torch.tensor([ids[chain[-2]]])))[0]
            if chain[-1] < len(ids) and all(mask[i] for i in chain):
                teacher = trainer.signals.distribution(hidden[0, [anchor + 1 + depth]])
                total += LOSSES["kl"](scores[None], teacher, None)[0]
    loss = trainer.compute_loss(trainer.model, row, num_items_in_batch=torch.tensor(1))
    torch.testing.assert_close(loss, total, atol=1e-3, rtol=1e-5)


def test_a_token_that_the_backbone_lacks_is_read_as_its_last(tmp_path):
    """A target's table may be padded, or have a few tokens more."""
    target, backbone, tokenizer = make_target("llama"), build_target(), SimpleNamespace(get_vocab=lambda: {"a": 0})
    config = PEagleBackboneConfig.for_backbone(
        target, tokenizer, backbone, tokenizer, mask_token_id=MASK, num_depths=3, speculation_depth=3
    )
    trainer = build_trainer(target, [], tmp_path, drafter=PEagleBackboneModel.from_backbone(backbone, config))
    ids, mask = document(20, 1)
    losses = []
    for token in (VOCAB - 1, VOCAB + 20):
        row = trainer.data_collator([block(([*ids[:1], token, *ids[2:]], mask))])
        row["input_ids"] = row["input_ids"].clone()
        features = torch.zeros(1, 20, config.num_features)  # so that the target's own reading makes no difference
        row |= {"features": features, "last_hidden": torch.zeros(1, 20, config.target_hidden_size)}
        losses.append(trainer.compute_loss(trainer.model, row))
    assert losses[0] == losses[1] and losses[0].isfinite()


# Losses and weights


@pytest.fixture
def rows():
    torch.manual_seed(0)
    logits, teacher = 2 * torch.randn(2, 9, 12)
    return logits, Teacher.of(teacher), torch.tensor([0, 3, -100, 5, 11, 7, 7, 2, 1])


def test_acceptance_is_1_less_the_total_variation(rows):
    logits, teacher, _ = rows
    variation = 0.5 * (teacher.probs - logits.softmax(-1)).abs().sum(-1)
    torch.testing.assert_close(acceptance(logits, teacher), 1 - variation)


def test_kl_has_the_value_and_the_gradient_of_its_definition(rows):
    logits, teacher, _ = rows
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    definition = F.kl_div(theirs.log_softmax(-1), teacher.probs, reduction="none").sum(-1)
    torch.testing.assert_close(LOSSES["kl"](ours, teacher, None), definition)
    weight = torch.rand(9)
    gradients = [
        torch.autograd.grad((loss * weight).sum(), x)[0]
        for loss, x in ((LOSSES["kl"](ours, teacher, None), ours), (definition, theirs))
    ]
    torch.testing.assert_close(*gradients)


def test_a_teacher_may_rule_tokens_out(rows):
    logits, teacher = rows[0], Teacher.of(rows[0].masked_fill(torch.arange(12) > 3, -torch.inf))
    definition = F.kl_div(logits.log_softmax(-1), teacher.probs, reduction="none").sum(-1)
    torch.testing.assert_close(LOSSES["kl"](logits, teacher, None), definition)


def test_cross_entropy_is_that_of_the_token_and_none_outside_the_draft_vocabulary(rows):
    logits, teacher, label = rows
    losses = LOSSES["ce"](logits, teacher, label)
    for row, token in enumerate(label.tolist()):
        expected = 0 if token < 0 else -logits[row].softmax(-1)[token].log()
        torch.testing.assert_close(losses[row], torch.as_tensor(expected, dtype=torch.float32))


def test_the_hybrid_loss_mixes_kl_and_total_variation_by_the_acceptance(rows):
    logits, teacher, label = rows
    accepted = acceptance(logits, teacher)
    share = torch.exp(-LK_RATE * accepted)
    expected = share * LOSSES["kl"](logits, teacher, label) + (1 - share) * (1 - accepted)
    torch.testing.assert_close(LOSSES["lk"](logits, teacher, label), expected)


def test_the_share_of_the_hybrid_loss_is_not_learned(rows):
    logits, teacher, label = rows
    logits.requires_grad_()
    accepted = acceptance(logits, teacher)
    (gradient,) = torch.autograd.grad(LOSSES["lk"](logits, teacher, label).sum(), logits)
    share = torch.exp(-LK_RATE * accepted.detach())
    fixed = share * LOSSES["kl"](logits, teacher, label) - (1 - share) * acceptance(logits, teacher)
    torch.testing.assert_close(gradient, torch.autograd.grad(fixed.sum(), logits)[0])


def test_weights_by_depth():
    # Two chains, of three slots and of two, and a slot without a chain, not in order.
    anchor, depth = torch.tensor([4, 9, 4, 2, 9, 4]), torch.tensor([1, 0, 0, 0, 1, 2])
    accepted = torch.tensor([0.5, 0.3, 0.8, 0.9, 0.2, 0.1])
    assert WEIGHTS["uniform"](anchor, depth, accepted).tolist() == [1] * 6
    torch.testing.assert_close(WEIGHTS["decay"](anchor, depth, accepted), DECAY ** depth.float())
    expected = torch.tensor([0.8, 1, 1, 1, 0.3, 0.8 * 0.5])
    torch.testing.assert_close(WEIGHTS["survival"](anchor, depth, accepted), expected)
    nothing = torch.tensor([], dtype=torch.long)
    assert all(len(weight(nothing, nothing, torch.tensor([]))) == 0 for weight in WEIGHTS.values())


def test_noise_changes_training_only_and_keeps_to_its_share(target, tmp_path):
    quiet, loud = (build_trainer(target, [], tmp_path / "out", feature_noise=noise) for noise in (0.0, 0.5))
    row = quiet.data_collator([BLOCKS[0]])
    losses = [t.training_step(t.model, row, num_items_in_batch=torch.tensor(1)).item() for t in (quiet, loud, loud)]
    assert len(set(losses)) == 3
    assert quiet.compute_loss(quiet.model, row) == loud.compute_loss(loud.model, row)


@pytest.mark.parametrize("limit", [0, 3, 10, 1000])
def test_max_anchors_bounds_every_depth_but_the_first(limit):
    mask, documents = torch.ones(60, dtype=torch.bool), torch.zeros(60, dtype=torch.long)
    _, depth, scored = sample_slots(mask, documents, 4, 0.8, 0.0, limit, torch.Generator().manual_seed(0))
    _, free, _ = sample_slots(mask, documents, 4, 0.8, 0.0, None, torch.Generator().manual_seed(0))
    for d in range(1, 4):
        assert (depth == d).sum() == min((free == d).sum(), limit)
    assert (depth == 0).sum() == 59


def test_a_step_with_nothing_supervised_leaves_what_momentum_would_move(target, tmp_path):
    """Blocks of both kinds in turn, without shuffling: only the first step changes anything."""
    options = {"weight_decay": 0.1, "learning_rate": 0.01}
    one = build_trainer(target, [BLOCKS[3]], tmp_path / "one", max_steps=1, **options)
    two = build_trainer(target, [BLOCKS[3], UNSUPERVISED], tmp_path / "two", max_steps=2, **options)
    two._get_train_sampler = lambda dataset=None: torch.utils.data.SequentialSampler(two.train_dataset)
    before = state(one)
    one.train(), two.train()
    assert changed(before, state(one))
    assert changed(state(one), state(two)) == set()


@pytest.mark.parametrize("name", ["features", "last_hidden"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_signals_that_are_not_finite_stop_the_run(target, tmp_path, name, value):
    trainer = build_trainer(target, [], tmp_path)
    row = trainer.data_collator([BLOCKS[0]])
    row |= dict(zip(("features", "last_hidden"), trainer.signals(row)))
    row[name][0, 3, 5] = value
    with pytest.raises(ValueError, match="not finite"):
        trainer.training_step(trainer.model, row, num_items_in_batch=torch.tensor(1))
