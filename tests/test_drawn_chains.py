"""Sampled chains through `generate`: drawn from the drafter's law, verified by the ratio test, with the target's law."""

import pytest
import torch
from conftest import VOCAB, Recorder, drafted, make_drafter, make_target, plain, prompt_of, scripted_for
from test_accept_law import enumerate_law, total_variation
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

import decoding_peagle
from decoding_peagle import Continuation
from tree_peagle import DraftTree


TWO = {"do_sample": True, "top_k": 2, "temperature": 1.4}
PATH = [(0,) * depth for depth in (1, 2, 3, 4)]  # a chain that is not drawn


def law_of_generate(monkeypatch, target, drafter=None):
    """The law of three new tokens over every outcome of every draw, of plain decoding without a drafter."""

    def rule(*_):
        generate = (
            plain if drafter is None else lambda target, *args, **kwargs: drafted(target, drafter, *args, **kwargs)
        )
        return tuple(generate(target, prompt_of(6), max_new_tokens=3, **TWO)[0, 6:].tolist())

    return enumerate_law(monkeypatch, rule, None, None, 3)


def make_near_miss(target, law, **fields):
    """A random drafter among the tokens that the target may say, so that their laws overlap in part."""
    drafter = make_drafter(target, draft_ids=torch.tensor(sorted({token for text in law for token in text})), **fields)
    if drafter.config.markov_rank:
        torch.nn.init.normal_(drafter.markov_head.next.weight)
    return drafter


@pytest.fixture
def trees(monkeypatch):
    """Every tree that was verified, with how many of its tokens were kept."""
    seen, accept = [], Continuation.accept

    def watched(text, logits, tree):
        seen.append((tree, accept(text, logits, tree)))
        return seen[-1][1]

    monkeypatch.setattr(Continuation, "accept", watched)
    return seen


@pytest.mark.parametrize(("name", "markov_rank"), [("llama", 0), ("gemma3", 3)])
def test_the_law_is_that_of_plain_generate(monkeypatch, trees, name, markov_rank):
    target = make_target(name)
    expected = law_of_generate(monkeypatch, target)
    assert len(expected) == 8
    law = law_of_generate(monkeypatch, target, make_near_miss(target, expected, markov_rank=markov_rank))
    assert total_variation(law, expected) < 1e-5
    assert {kept for tree, kept in trees if tree.laws} == {0, 1}


def test_a_wrong_law_is_seen(monkeypatch, llama):
    """The drafts are drawn from warped scores, and tested as if they had not been."""
    draw_chain = decoding_peagle.draw_chain

    def wrong(drafter, logits, draft_ids, pick):
        tree = draw_chain(drafter, logits, draft_ids, pick)
        return DraftTree.chain(tree.tokens, laws=(draft_ids, logits.softmax(-1)))

    expected = law_of_generate(monkeypatch, llama)
    monkeypatch.setattr(decoding_peagle, "draw_chain", wrong)
    assert total_variation(law_of_generate(monkeypatch, llama, make_near_miss(llama, expected)), expected) > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"draft_tree": 4},
        {"draft_tree": PATH},
        {"prompt_lookup_num_tokens": 3},
        {"do_sample": False},
        {"draft_tree": 0},
    ],
    ids=str,
)
def test_only_sampled_chains_of_the_drafter_are_drawn(llama, trees, options):
    drafted(llama, make_drafter(llama), prompt_of(6), **{"do_sample": True} | options)
    assert len(trees) > 5 and all(tree.laws is None for tree, _ in trees)


def test_the_drafts_are_warped_as_the_target_is(llama, trees):
    options = {"do_sample": True, "top_k": 3, "temperature": 0.5, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    drafter = make_drafter(llama)
    drafted(llama, drafter, prompt_of(6), **options)
    for tree, _ in trees[1:-1]:
        ids, laws = tree.laws
        assert ids.tolist() == list(range(VOCAB)) and len(laws) == len(tree.tokens)
        assert ((laws > 0).sum(-1) == 3).all() and (laws.gather(1, torch.tensor(tree.tokens)[:, None]) > 0).all()


def test_where_only_one_token_is_left_sampling_is_greedy(llama, trees):
    prompt = prompt_of(6)
    out = drafted(llama, scripted_for(llama, prompt), prompt, do_sample=True, top_k=1)
    assert torch.equal(out, plain(llama, prompt))
    assert {kept for _, kept in trees} > {0, 1} and trees[1][0].laws


class Lengths(LogitsProcessor):
    """A processor with a state, which every position changes once."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.shape[1])
        return scores


class HotterAndHotter(TemperatureLogitsWarper):
    """Looks at the history, although it is of a kind that does not."""

    def __call__(self, input_ids, scores):
        return scores / (0.001 * input_ids.shape[1])


def test_processors_are_called_for_emitted_positions_alone(llama, trees):
    lengths, recorder = Lengths(), Recorder()
    processors = LogitsProcessorList([lengths, HotterAndHotter(1.0)])
    options = {"do_sample": True, "top_k": 5, "logits_processor": processors, "streamer": recorder}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt)
    draft = drafter.draft
    drafter.draft = lambda *args: 50 * draft(*args)
    out = drafted(llama, drafter, prompt, **options)
    assert lengths.seen == list(range(6, 30)) and recorder.tokens == out.sequences[0].tolist()
    assert 0 < sum(out.stats.accepted) == sum(kept for _, kept in trees)
    expected = llama(out.sequences).logits[0, 5:-1]
    torch.testing.assert_close(torch.cat(out.logits), expected, atol=1e-4, rtol=1e-4)
    for token, scores in zip(out.sequences[0, 6:], out.scores):
        assert scores[0, token] > -torch.inf and (scores > -torch.inf).sum() == 5


def test_a_drawn_chain_ends_at_an_end_token(llama, trees):
    prompt, ends = prompt_of(6), list(range(0, VOCAB, 4))
    for seed in range(8):
        torch.manual_seed(seed)
        out = drafted(llama, make_drafter(llama), prompt, do_sample=True, eos_token_id=ends)[0, 6:].tolist()
        assert (out[-1] in ends or len(out) == 24) and not set(out[:-1]) & set(ends)


WARPERS = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.8,
    "min_p": 0.05,
    "typical_p": 0.7,
    "epsilon_cutoff": 3e-3,
    "eta_cutoff": 3e-3,
}


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("markov_rank", [0, 3])
def test_a_drafter_without_a_law_decodes(llama, trees, fault, markov_rank):
    drafter = make_drafter(llama, markov_rank=markov_rank)
    draft = drafter.draft
    drafter.draft = lambda *args: draft(*args).fill_(fault)
    for name, value in WARPERS.items():
        out = drafted(llama, drafter, prompt_of(6), do_sample=True, **{"top_k": 0, "max_new_tokens": 6, name: value})
        assert out.shape == (1, 12)
    assert all(tree.laws[1].sum(-1).eq(1).all() for tree, _ in trees if tree.tokens)


def test_each_warper_reaches_the_drafter(llama, trees):
    for name, value in WARPERS.items():
        trees.clear()
        drafter = make_drafter(llama)
        drafter.lm_head.weight.data.mul_(4)  # a law with likely and unlikely tokens
        drafted(llama, drafter, prompt_of(6), do_sample=True, **{"top_k": 0, "max_new_tokens": 3, name: value})
        _, laws = trees[1][0].laws
        assert (laws == 0).any() or name == "temperature"


def test_half_precision_drawn_chains_decode():
    target = make_target("llama").to(torch.bfloat16)
    out = drafted(target, make_drafter(target, markov_rank=3), prompt_of(6), **TWO)
    assert out.shape == (1, 30)
