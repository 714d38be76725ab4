# ruff: noqa: F811 (trees is a fixture that is imported)
"""A drafter that drafts one token after the other: what its slots hold, and that decoding with it stays the target's own.

All models are tiny and random; float32 on the CPU.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from batch_helpers import batch_of
from conftest import VOCAB, drafted, make_drafter, make_target, plain, prompt_of
from safetensors.torch import load_file
from test_accept_law import total_variation
from test_drawn_chains import law_of_generate, trees  # noqa: F401
from test_model import features_of, training_logits
from transformers import DynamicCache

import decoding_peagle
from batch_peagle import BatchCache, draft_rows
from modeling_peagle import PEagleModel
from modeling_peagle_sequential import best, waves
from sizing_peagle import Costs


DEPTHS = 4
CHEAP = Costs([1, 2, 4, 8, 16, 32], [1.0, 1.0, 1.01, 1.02, 1.05, 1.1], 0.1)


def make_sequential(target, **fields):
    """A random drafter whose tokens depend on what it reads."""
    drafter = make_drafter(target, **{"parallel_drafting": False, "speculation_depth": DEPTHS} | fields)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 1:
            parameter.data.mul_(0.5 + torch.rand(parameter.shape))
        elif name.startswith("layers"):
            parameter.data.mul_(8)
    return drafter


def near_miss(target, continuation, **fields):
    """A random drafter among a few tokens that the target does say, so that it is right now and then."""
    return make_sequential(target, draft_ids=continuation.unique()[:3], **fields)


def by_definition(drafter, table, tokens, features, anchor, chain, feed=lambda state: state):
    """Scores at each depth behind `anchor`, by EAGLE-3's loop without a cache: all slots are computed anew at each depth.

    `chain` are the tokens drafted at depths 0, 1, and so on; `feed` may spoil what a depth hands to the next.
    """
    config, layer = drafter.config, drafter.layers[0]
    states, ids = drafter.fuse(features[0, : anchor + 1]), tokens[1 : anchor + 2]
    scores = []
    for drafts in range(len(chain) + 1):
        hidden = states[None]
        both = torch.cat([layer.input_layernorm(F.embedding(ids, table)), layer.hidden_norm(states)], dim=-1)[None]
        rotation = drafter.rotary_emb(hidden, torch.arange(len(ids))[None])
        causal = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        hidden = (layer.hidden_norm(hidden) if config.norm_before_residual else hidden) + layer.self_attn(
            both, position_embeddings=rotation, attention_mask=causal
        )[0]
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        scores.append(drafter.lm_head(drafter.norm(hidden[0, -1])))
        if drafts < len(chain):
            fed = drafter.norm(hidden[0, -1]) if config.norm_output else hidden[0, -1]
            states, ids = torch.cat([states, feed(fed)[None]]), torch.cat([ids, chain[drafts : drafts + 1]])
    return torch.stack(scores)


STYLES = {
    "eagle3": {"fc_norm": False},
    "eagle3.1": {"norm_output": True},
    "speculators": {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": False},
}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@torch.no_grad()
def test_drafting_is_the_loop_of_eagle3(llama, style):
    drafter, tokens = make_sequential(llama, **style), prompt_of(12)[0]
    features, table, cache = features_of(llama, drafter, tokens), llama.get_input_embeddings().weight, DynamicCache()
    for start, end in ((0, 5), (5, 6), (6, 9)):
        logits = drafter.draft(tokens[start : end + 1], features[:, start:end], DEPTHS, cache, table)
        assert cache.get_seq_length() == end
        chain = drafter.choose(logits)
        arguments = drafter, table, tokens, features, end - 1
        expected = by_definition(*arguments, chain[:-1])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        wrong = by_definition(*arguments, (chain[:-1] + 1) % VOCAB)
        assert (wrong - expected)[1:].abs().max() > 1e-3
        drafter.config.norm_output = not drafter.config.norm_output
        wrong = by_definition(*arguments, chain[:-1])
        assert (wrong - expected)[1:].abs().max() > 1e-3
        drafter.config.norm_output = not drafter.config.norm_output


def test_slots_are_read_depth_by_depth():
    index = torch.tensor([[1, 2, 3, -2, -2, -1], [0, 1, 2, 0, -2, -1]])
    assert waves(index) == [(0, 3), (3, 5), (5, 6)]
    assert waves(index[:, :3]) == [(0, 3)]


# Training and decoding are the same function


def forced(tokens):
    """Picks these tokens, whatever the scores."""
    rest = iter(tokens.tolist())
    return lambda scores: torch.tensor([next(rest)])


@pytest.mark.parametrize("num_layers", [1, 2])
@torch.no_grad()
def test_the_training_forward_equals_the_decoding_forward_at_every_anchor_and_depth(target, num_layers):
    drafter, tokens = make_sequential(target, num_hidden_layers=num_layers), prompt_of(12)[0]
    pairs = [(a, d) for d in range(DEPTHS) for a in range(len(tokens) - 1 - d)]
    anchor, depth = (torch.tensor(part) for part in zip(*pairs))
    trained = training_logits(target, drafter, tokens, anchor, depth)
    features, table, cache = features_of(target, drafter, tokens), target.get_input_embeddings().weight, DynamicCache()
    for a in range(len(tokens) - 1):
        within = min(DEPTHS, len(tokens) - 1 - a)
        pick = forced(tokens[a + 2 :])
        decoded = drafter.draft(tokens[a : a + 2], features[:, a : a + 1], within, cache, table, pick)
        torch.testing.assert_close(decoded, trained[anchor == a], atol=1e-4, rtol=1e-4)
    # Deeper slots that see those of other anchors do not say the same.
    leaky = training_logits(target, drafter, tokens, anchor, depth, anchor[None] <= anchor[:, None])
    assert (leaky - trained)[depth > 0].abs().max() > 1e-2


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_rows_of_a_batch_are_drafted_as_alone(name):
    target = make_target(name)
    drafter, table = make_sequential(target, num_hidden_layers=2), target.get_input_embeddings().weight
    prompts = [prompt_of(length)[0] for length in (9, 14, 5)]
    features = [features_of(target, drafter, tokens)[0] for tokens in prompts]
    cache, alone, start = BatchCache(3), [DynamicCache() for _ in prompts], [0] * 3
    for ends in ([3, 8, 2], [4, 12, 3], [8, 13, 4]):
        pieces = [tokens[s : e + 1] for tokens, s, e in zip(prompts, start, ends)]
        read = [own[s:e] for own, s, e in zip(features, start, ends)]
        together = draft_rows(drafter, pieces, read, DEPTHS, cache, table)
        assert cache.lengths == ends
        for row, logits in enumerate(together):
            expected = drafter.draft(pieces[row], read[row][None], DEPTHS, alone[row], table)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        start = ends


# Decoding


SHAPES = {
    "chain": {},
    "two": {"num_assistant_tokens": 2},
    "tree": {"draft_tree": 9},
    "paths": {"draft_tree": [(0,), (1,), (0, 0), (0, 1), (1, 0)]},
    "auto": {"draft_tree": "auto", "draft_costs": CHEAP, "num_assistant_tokens": None},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "none": {"draft_tree": 0},
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [*(("llama", shape) for shape in SHAPES), ("qwen3", "chain"), ("gemma3", "chain"), ("gemma3", "tree")],
)
def test_greedy_output_equals_plain(name, shape):
    target, prompt = make_target(name), prompt_of(11)
    expected = plain(target, prompt)
    drafter = near_miss(target, expected[0, 11:])
    out = drafted(target, drafter, prompt, return_dict_in_generate=True, **SHAPES[shape])
    assert torch.equal(out.sequences, expected)
    assert max(out.stats.drafted) <= DEPTHS and (sum(out.stats.accepted) > 0 or shape == "none")


@pytest.mark.parametrize(("name", "shape"), [("llama", "auto"), ("llama", "tree"), ("gemma3", "chain")])
def test_greedy_batches_equal_plain(name, shape):
    target, (ids, options) = make_target(name), batch_of([4, 9, 2])
    expected = plain(target, ids, **options)
    drafter = near_miss(target, expected[:, 9:])
    out = drafted(target, drafter, ids, return_dict_in_generate=True, **options, **SHAPES[shape])
    assert torch.equal(out.sequences, expected) and sum(out.stats.accepted) > 0


def test_a_tree_has_the_chain_and_what_else_its_laws_know(llama, monkeypatch):
    """Nothing hangs behind a token that the drafter did not draft: it did not read on from there."""
    trees, propose = [], decoding_peagle.propose
    monkeypatch.setattr(
        decoding_peagle, "propose", lambda *args: trees.append((propose(*args), args[1])) or trees[-1][0]
    )
    drafter = make_sequential(llama)
    drafter.lm_head.weight.data.mul_(8)
    drafted(llama, drafter, prompt_of(6), draft_tree=12)
    for tree, logits in trees[:-3]:
        chain = logits.argmax(dim=-1).tolist()
        paths = [[tree.tokens[node - 1] for node in tree.path(leaf)[1:]] for leaf in range(1, len(tree.tokens) + 1)]
        assert all(path[:-1] == chain[: len(path) - 1] for path in paths)
        law = logits.log_softmax(dim=-1)
        for path, log_prob in zip(paths, tree.log_probs):
            assert log_prob == pytest.approx(sum(law[d, t].item() for d, t in enumerate(path)), abs=1e-4)
    assert any(not tree.is_chain and max(tree.depths) > 1 for tree, _ in trees)


def make_sampled(target, law, **fields):
    return make_sequential(target, draft_ids=torch.tensor(sorted({token for text in law for token in text})), **fields)


def test_sampled_chains_have_the_law_of_plain_generate(monkeypatch, trees, llama):
    expected = law_of_generate(monkeypatch, llama)
    law = law_of_generate(monkeypatch, llama, make_sampled(llama, expected))
    assert total_variation(law, expected) < 1e-5
    assert {kept for tree, kept in trees if tree.laws} == {0, 1}


def test_tokens_of_another_law_than_they_are_said_to_have_are_seen(monkeypatch, llama):
    """The best tokens are drafted, and the laws of draws given for them."""
    draw = decoding_peagle.Draws.__call__

    def wrong(self, scores):
        draw(self, scores)
        self.tokens[-1] = best(scores)
        return self.tokens[-1]

    expected = law_of_generate(monkeypatch, llama)
    monkeypatch.setattr(decoding_peagle.Draws, "__call__", wrong)
    assert total_variation(law_of_generate(monkeypatch, llama, make_sampled(llama, expected)), expected) > 1e-3


def test_the_tokens_that_were_drawn_are_those_that_were_read_on_from(monkeypatch, llama, trees):
    """And the law of each is that of the scores behind those before it."""
    drafter, seen = make_sequential(llama), []
    draft = drafter.draft
    drafter.draft = lambda *args: seen.append((args, draft(*args))) or seen[-1][1]
    drafted(llama, drafter, prompt_of(6), do_sample=True, top_k=0)
    assert len(seen) > 5
    chains = [tree for tree, _ in trees if tree.tokens]
    for (args, logits), tree in zip(seen, chains):
        ids, laws = tree.laws
        torch.testing.assert_close(laws, logits.softmax(dim=-1))
        assert [*map(len, args[5].tokens)] == [1] * len(tree.tokens)
        assert torch.cat(args[5].tokens).tolist() == tree.tokens
    assert any(len(set(tree.tokens)) > 1 for tree in chains)


def test_batches_and_several_answers_are_sampled(llama):
    out = drafted(llama, make_sequential(llama), prompt_of(6), do_sample=True, num_return_sequences=3, top_k=5)
    assert out.shape == (3, 30)
    ids, options = batch_of([4, 9, 2])
    out = drafted(llama, make_sequential(llama), ids, do_sample=True, top_k=1, **options)
    assert torch.equal(out, plain(llama, ids, **options))


def test_what_contradicts_itself_is_refused(llama):
    with pytest.raises(Exception, match="mask_token_id None must lie"):
        make_drafter(llama, parallel_drafting=True, mask_token_id=None)
    with pytest.raises(Exception, match="markov_rank=0"):
        make_sequential(llama, markov_rank=4)
    config = make_sequential(llama).config
    assert not config.parallel_drafting and config.mask_token_id is None and config.sized_depth == DEPTHS
    assert make_drafter(llama).config.sized_depth == 8


def test_a_saved_one_comes_back(llama, tmp_path):
    drafter, prompt = make_sequential(llama, norm_output=True), prompt_of(6)
    drafter.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["parallel_drafting"] is False and said["norm_output"] is True and "ptd_token_id" not in said
    assert "mask_hidden" not in load_file(tmp_path / "model.safetensors")
    again = PEagleModel.from_pretrained(tmp_path)
    both = [drafted(llama, each, prompt, return_dict_in_generate=True) for each in (drafter, again)]
    assert again.config.to_json_string() == drafter.config.to_json_string()
    assert both[0].stats.accepted == both[1].stats.accepted and torch.equal(both[0].sequences, both[1].sequences)
