"""Batches: every row as plain decoding writes it, in the batch and alone, however differently the rows advance."""

import pytest
import torch
from batch_helpers import PLANS, STATIC, Script, assert_greedy, batch_of
from conftest import (
    TARGETS,
    VOCAB,
    WINDOW,
    TinyTokenizer,
    drafted,
    make_drafter,
    make_target,
    plain,
)
from transformers import DynamicCache

import batch_peagle
from batch_peagle import BatchCache
from configuration_peagle import PEagleBackboneConfig
from modeling_peagle import Drafter
from modeling_peagle_backbone import PEagleBackboneModel
from tree_peagle import DraftTree
from verification_peagle import Continuation


LENGTHS = {"short": [3, 6], "around the window": [WINDOW - 1, WINDOW + 1, 1], "long": [5, 21, 13, 21]}
SHAPES = {"chain": None, "none": 0, "5": 5, "16": 16, "static": STATIC}


@pytest.mark.parametrize(
    ("name", "lengths", "shape"),
    [
        ("llama", "short", None),
        ("llama", "long", STATIC),
        ("qwen3", "around the window", 5),
        ("gemma3", "around the window", None),
        ("gemma3", "long", 16),
        ("gemma3_composite", "long", 5),
    ],
)
def test_greedy_output_equals_plain(monkeypatch, name, lengths, shape):
    assert_greedy(monkeypatch, make_target(name), *batch_of(LENGTHS[lengths]), draft_tree=shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_output_equals_plain_over_the_whole_grid(monkeypatch, name, lengths, shape):
    target = make_target(name)
    for num_tokens in (1, 3, 8):
        assert_greedy(monkeypatch, target, *batch_of(lengths), draft_tree=shape, num_assistant_tokens=num_tokens)


@pytest.mark.parametrize("name", ["llama", "gemma3_composite"])
def test_eager_attention_decodes_batches_too(monkeypatch, name):
    target = make_target(name)
    target.set_attn_implementation("eager")
    assert_greedy(monkeypatch, target, *batch_of(LENGTHS["around the window"]), draft_tree=STATIC)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_limit_and_no_drafts(monkeypatch, name):
    target = make_target(name)
    ids, options = batch_of([4, 9, 2])
    reference = plain(target, ids, **options)
    for limit in range(1, 8):
        with monkeypatch.context() as patch:
            Script(patch, reference, options["attention_mask"], wide=limit % 2)
            own = options | {"max_new_tokens": limit, "num_assistant_tokens": 3}
            out = drafted(target, make_drafter(target), ids, draft_tree=[None, 6, 0][limit % 3], **own)
        assert torch.equal(out, reference[:, : 9 + limit])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_end_at_different_times_in_pad_tokens(monkeypatch, name):
    target = make_target(name)
    ids, options = batch_of([4, 9, 2, 6])
    reference = plain(target, ids, **options)
    drafter = make_drafter(target)
    for places in ([1, 4, 6, 9], [7, 0, 2, 0]):  # of the token that ends the row
        eos = [reference[row, 9 + place].item() for row, place in enumerate(places)]
        expected = plain(target, ids, eos_token_id=eos, **options)
        with monkeypatch.context() as patch:
            script = Script(patch, reference, options["attention_mask"])
            out = drafted(target, drafter, ids, eos_token_id=eos, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, expected)
        # A finished row takes part in no further forward.
        assert len(out.stats.emitted) == sum(script.batches)
        assert len(script.batches) >= len(script.drafts) >= len(script.batches) - 1


def test_rows_advance_independently(monkeypatch):
    """The row whose drafts are right is done in 3 rounds, the other in 12; each round is one forward of either model."""
    target, (ids, options) = make_target("llama"), batch_of([4, 7])
    options["max_new_tokens"] = 13
    expected = plain(target, ids, **options)
    script, forwards = Script(monkeypatch, expected, options["attention_mask"], plans=PLANS[:2]), []
    drafter = make_drafter(target)
    hooks = [
        model.register_forward_hook(lambda *_, name=name: forwards.append(name), always_call=True)
        for name, model in (("target", target), ("drafter", drafter))
    ]
    assert torch.equal(drafted(target, drafter, ids, num_assistant_tokens=3, **options), expected)
    for hook in hooks:
        hook.remove()
    assert script.batches == [2] * 3 + [1] * 9
    assert script.drafts == [2] * 3 + [1] * 8  # the last token needs no draft
    assert forwards.count("target") == 1 + len(script.batches) and forwards.count("drafter") == len(script.drafts)


# Caches, features and slots


class Watch(Script):
    """Compares both caches after each round, and what the drafter says, with fresh ones of each row alone."""

    rounds = 0

    def __init__(self, monkeypatch, reference, mask, *, target, **settings):
        super().__init__(monkeypatch, reference, mask, **settings)
        self.target, self.texts, start = target, [], Continuation.__init__

        def watched(text, *args):
            start(text, *args)
            self.texts.append(text)

        monkeypatch.setattr(batch_peagle.Continuation, "__init__", watched)

    def text(self, row):
        return self.texts[row].sequence[:, self.padding[row] :]

    def assert_equal(self, cache, index, fresh, length):
        assert cache.lengths[index] == length
        for layer, other in zip(cache.layers, fresh.layers, strict=True):
            for ours, theirs in ((layer.keys, other.keys), (layer.values, other.values)):
                rows = theirs.shape[-2]  # a sliding layer keeps only the last
                torch.testing.assert_close(ours[index, :, length - rows : length], theirs[0], atol=2e-5, rtol=1e-4)

    def kept(self, cache):
        if cache is not self.caches[0]:
            return  # the drafter's
        self.rounds += len(self.batches) > 0
        for index, row in enumerate(cache.rows):
            fresh, text = DynamicCache(config=self.target.config), self.text(row)
            self.target(text[:, :-1], cache=fresh)
            self.assert_equal(cache, index, fresh, text.shape[1] - 1)

    def look(self, drafter, logits, cache, embedding):
        ids = drafter.config.eagle_aux_hidden_state_layer_ids
        for index, row in enumerate(cache.rows):
            fresh, text = DynamicCache(), self.text(row)
            states = self.target(text[:, :-1], output_hidden_states=True, use_cache=False).hidden_states
            features = torch.cat([states[i] for i in ids], dim=-1)
            expected = drafter.draft(text[0], features, logits.shape[1], fresh, embedding)
            torch.testing.assert_close(logits[index], expected, atol=2e-5, rtol=1e-4)
            self.assert_equal(cache, index, fresh, fresh.get_seq_length())


def watched(monkeypatch, target, lengths, **settings):
    ids, options = batch_of(lengths)
    expected = plain(target, ids, **options)
    watch = Watch(monkeypatch, expected, options["attention_mask"], target=target, wide=True)
    out = drafted(target, make_drafter(target), ids, num_assistant_tokens=3, **options, **settings)
    assert torch.equal(out, expected)
    assert watch.rounds > 3 and len(watch.drafts) > 3


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma3_composite"])
def test_both_caches_and_the_drafts_are_those_of_each_row_alone(monkeypatch, name):
    watched(monkeypatch, make_target(name), [3, 10, 6], draft_tree=7)


FAULTS = ["padding is seen", "padding is kept", "other nodes are kept", "positions by column", "no window", "causal"]


@pytest.mark.parametrize("fault", FAULTS)
def test_known_faults_are_seen(monkeypatch, fault):
    target, masks, keep = make_target("gemma3"), batch_peagle.tree_masks, BatchCache.keep
    if fault == "padding is seen":
        blind = lambda model, trees, depths, lengths: masks(model, trees, depths, [max(lengths)] * len(trees))  # noqa: E731
        monkeypatch.setattr(batch_peagle, "tree_masks", blind)
    elif fault == "padding is kept":
        every = lambda cache, paths: keep(cache, [range(max(map(len, paths))) for _ in paths])  # noqa: E731
        monkeypatch.setattr(BatchCache, "keep", every)
    elif fault == "other nodes are kept":
        first = lambda cache, paths: keep(cache, [list(range(len(path))) for path in paths])  # noqa: E731
        monkeypatch.setattr(BatchCache, "keep", first)
    elif fault == "positions by column":

        def wrong(_, args, inputs):
            if isinstance(inputs.get("attention_mask"), dict):  # not in the prefill
                positions = inputs["position_ids"]
                inputs["position_ids"] = positions - positions[:, :1] + positions.max()
            return args, inputs

        target.register_forward_pre_hook(wrong, with_kwargs=True)
    elif fault == "no window":
        monkeypatch.setattr(batch_peagle, "sliding_window_overlay", lambda window: lambda *_: True)
    else:
        causal = lambda tree: torch.ones(len(tree.depths), len(tree.depths)).tril().bool()  # noqa: E731
        monkeypatch.setattr(DraftTree, "ancestors", causal)
    with pytest.raises(AssertionError):
        watched(monkeypatch, target, [3, 10, 6], draft_tree=7)


@pytest.mark.parametrize("kind", ["own", "backbone"])
def test_long_prompts_are_read_in_pieces_by_both_kinds_of_drafter(monkeypatch, kind):
    target, (ids, options) = make_target("gemma3"), batch_of([4, 17, 11])
    drafter = make_drafter(target)
    if kind == "backbone":
        config = PEagleBackboneConfig.for_backbone(
            target, TinyTokenizer(), target, TinyTokenizer(), mask_token_id=5, num_depths=8
        )
        drafter = PEagleBackboneModel.from_backbone(target, config).eval()
    monkeypatch.setattr(Drafter, "max_slots", 5)
    options["max_new_tokens"] = 4
    expected = plain(target, ids, **options)
    Watch(monkeypatch, expected, options["attention_mask"], target=target)
    if kind == "backbone":  # its first slot has no features, and its columns are counted from there
        monkeypatch.setattr(Script, "row", lambda self, row, length, depths: torch.zeros(depths, VOCAB))
    assert torch.equal(drafted(target, drafter, ids, **options), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("plan", [PLANS[0], PLANS[1]], ids=["right", "wrong"])
def test_a_batch_drafts_as_much_as_pays(monkeypatch, name, plan):
    """A drafter that is wrong is asked ever more rarely; what it has not read by then it reads at once."""
    target = make_target(name)
    ids, options = batch_of([4, 9, 2])
    options["max_new_tokens"] = 40
    expected = plain(target, ids, **options)
    script = Script(monkeypatch, expected, options["attention_mask"], plans=[plan])
    settings = {"draft_tree": "auto", "draft_costs": {"rows": [1, 8], "target": [1.0, 1.1], "draft": 0.2}}
    out = drafted(target, make_drafter(target), ids, return_dict_in_generate=True, **options, **settings)
    assert torch.equal(out.sequences, expected)
    if plan is PLANS[0]:
        assert out.stats.tau > 3 and len(script.drafts) >= len(script.batches) - 1
    else:
        assert out.stats.tau == 1 and 2 <= len(script.drafts) < len(script.batches) / 4
