"""Drafts sized by cost: the size that pays most, plain decoding where none does, and the same tokens whatever is chosen."""

import itertools
import json
import random
import time
from collections import Counter
from dataclasses import asdict

import pytest
import torch
from conftest import (
    PATTERNS,
    WINDOW,
    drafted,
    make_drafter,
    make_scripted,
    make_target,
    plain,
    prompt_of,
    scripted_for,
)
from test_tree import laws
from test_tree_limits import TOKENS, gpt_neo, make_other
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

import sizing_peagle
from prepack_peagle import prepack
from sizing_peagle import Costs, Sizer, costs_of, measure_costs
from tree_peagle import best_first, with_branch


# As on a GPU with a small target, as on a CPU with prepacked layers, and where no draft can pay.
CHEAP = Costs([1, 2, 4, 8, 16, 32], [1.0, 1.0, 1.01, 1.02, 1.05, 1.1], 0.1)
DEAR = Costs([1, 2, 4, 8, 16, 32], [1.0, 1.08, 1.13, 1.27, 1.61, 2.33], 0.1)
NEVER = Costs([1, 2], [1.0, 3.0], 0.1)
AUTO = {"draft_tree": "auto", "num_assistant_tokens": None, "return_dict_in_generate": True}


def confident(drafter, scale=9):
    """A scripted drafter that is sure of what it drafts, right or wrong."""
    draft = drafter.draft
    drafter.draft = lambda *args: scale * draft(*args)
    return drafter


def loss(stats, costs):
    """What the rounds cost above plain decoding, as a share of that, by the costs alone."""
    spent = sum(costs.forward(nodes + 1) for nodes in stats.nodes)
    spent += sum(costs.draft + costs.host for seconds in stats.draft_times if seconds)
    return spent / (sum(stats.emitted) * costs.forward(1)) - 1


# Costs


def test_costs_are_linear_between_and_beyond_what_was_measured():
    costs = Costs([1, 2, 4, 8], [10.0, 12.0, 13.0, 11.0], draft=2.0, host=0.5)
    assert [costs.forward(rows) for rows in (1, 2, 3, 4, 6, 8)] == [10, 12, 12.5, 13, 12, 11]
    assert costs.forward(64) == 11  # more rows are never cheaper without end
    assert Costs([1, 2, 4], [10.0, 12.0, 13.0], 0.0).forward(10) == 16
    assert Costs([1], [3.0], 0.0).forward(7) == 3
    assert costs.round(2) == 2 + 12.5 + 0.5
    reader = Costs([1, 2], [10.0, 12.0], draft=2.0, read=0.25)
    assert reader.round(1, unread=9) == 2 + 8 * 0.25 + 12 and reader.round(1) == reader.round(1, 0) == 14
    assert reader.of_batch(2).reading(9) == 4
    assert Costs(**json.loads(json.dumps(asdict(costs)))) == costs


@pytest.mark.parametrize(
    "fields", [([], []), ([2], [1.0]), ([1, 1], [1.0] * 2), ([1, 2], [1.0]), ([1], [0.0]), ([1], [float("nan")])]
)
def test_costs_that_are_none_are_refused(fields):
    with pytest.raises(ValueError, match="ascending rows"):
        Costs(*fields, draft=1.0)
    for wrong in ({"draft": -1.0}, {"draft": 1.0, "host": -1.0}, {"draft": 1.0, "read": -1.0}):
        with pytest.raises(ValueError, match="at least 0"):
            Costs([1], [1.0], **wrong)


# The size of a draft


def test_the_size_is_the_best_of_all():
    rng, sizes = random.Random(0), set()
    for seed in range(60):
        times = sorted(rng.uniform(1, 1 + seed / 5) for _ in range(5))
        costs = Costs([1, 2, 5, 9, 30], times, rng.uniform(0, 1), rng.uniform(0, 1))
        tree = best_first(laws(seed, 4, 6, conditional=seed % 2 == 1), 25)
        if seed % 3 == 0:
            tree = with_branch(tree, [60, 61, 62], -0.3, 25)  # what comes last is not the least probable any more
        chosen = Sizer(costs, 4, clocked=False).cut(tree)
        weights = sorted((tree.probability(node) for node in range(1, len(tree.tokens) + 1)), reverse=True)

        def rate(nodes, costs=costs, weights=weights):
            return (1 + sum(weights[:nodes])) / costs.round(nodes)

        assert rate(len(chosen.tokens)) == pytest.approx(max(map(rate, range(len(weights) + 1))))
        assert chosen.expected_accepted == pytest.approx(sum(weights[: len(chosen.tokens)]))
        sizes.add(len(chosen.tokens))
    assert 0 in sizes and len(sizes) > 8


def test_no_more_nodes_are_drafted_than_could_ever_pay():
    assert Sizer(CHEAP, 4, False).most == 63
    assert (
        Sizer(Costs([1, 2], [1.0, 1.5], 0.1), 4, False).most == 7
    )  # 9 rows cost more than 5 tokens, the most of a round
    assert Sizer(NEVER, 4, False).most == 0  # nor do two rows pay, which give two tokens at best


# Decoding


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def target(request):
    return make_target(request.param)


@pytest.fixture(scope="module")
def references(target):
    """Prompts, and what the target makes of them."""
    prompts = [prompt_of(length) for length in (WINDOW - 1, 3 * WINDOW)]
    return [(prompt, plain(target, prompt)[0].tolist()) for prompt in prompts]


@pytest.mark.parametrize("costs", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_greedy_output_equals_plain(target, references, costs):
    """Within the window and behind it."""
    kept = Counter()
    for prompt, reference in references:
        drafters = {name: confident(make_scripted(target, reference, plan)) for name, plan in PATTERNS.items()}
        for name, drafter in (drafters | {"random": make_drafter(target, num_hidden_layers=2)}).items():
            out = drafted(target, drafter, prompt, draft_costs=costs, max_new_tokens=16, **AUTO)
            assert out.sequences[0].tolist() == reference[: prompt.shape[1] + 16]
            assert sum(out.stats.emitted) == 15 and max(out.stats.drafted) <= drafter.config.num_depths
            kept[name] += sum(out.stats.accepted)
    assert kept["wrong"] == 0 and (kept["right"] > 20)


def test_a_seeded_sample_is_that_of_plain_sampling(target):
    prompt, options = prompt_of(9), {"do_sample": True, "temperature": 0.7, "top_k": 20}
    for seed in range(2):
        torch.manual_seed(seed)
        expected = plain(target, prompt, **options)
        drafter = confident(make_scripted(target, [*expected[0].tolist(), *range(30)], PATTERNS["mixed"]))
        torch.manual_seed(seed)
        out = drafted(target, drafter, prompt, draft_costs=CHEAP, **AUTO, **options)
        assert torch.equal(out.sequences, expected) and sum(out.stats.accepted) > 0


def test_an_oracle_drafts_deep_where_rows_are_cheap(target):
    prompt = prompt_of(6)
    drafter = confident(scripted_for(target, prompt, "right"))
    out = drafted(target, drafter, prompt, draft_costs=CHEAP, **AUTO)
    assert set(out.stats.drafted[:-1]) == {8} and out.stats.emitted[:-1] == [9] * (len(out.stats.emitted) - 1)
    assert loss(out.stats, CHEAP) < -0.8


def test_a_hopeless_drafter_costs_little(monkeypatch):
    target, prompt = make_target("llama_tied"), prompt_of(6)
    reference = plain(target, prompt, max_new_tokens=200)

    def answer(sure):
        drafter = confident(make_scripted(target, reference[0].tolist(), [False]), 9 if sure else 1)
        out = drafted(target, drafter, prompt, draft_costs=DEAR, max_new_tokens=200, **AUTO)
        assert torch.equal(out.sequences, reference) and sum(out.stats.accepted) == 0
        assert sum(seconds > 0 for seconds in out.stats.draft_times) == len(drafter.calls)
        assert (max(out.stats.nodes) > 0) == sure
        return loss(out.stats, DEAR), len(drafter.calls)

    asked = Sizer.drafts
    for sure in (True, False):
        lost, tries = answer(sure)
        assert lost < 0.03 and tries < 35
    monkeypatch.setattr(Sizer, "drafts", lambda self, unread: asked(self, unread) or True)
    lost, tries = answer(sure=True)
    assert lost > 0.08 and tries == 198  # the last token needs no draft


def test_after_rounds_without_drafts_the_drafter_knows_all_that_it_would_have_read(target, monkeypatch):
    """Its drafts are those of a run in which it drafted in every round."""
    prompt, seen, rounds, drafts_at = prompt_of(7), [], itertools.count(), Sizer.drafts
    monkeypatch.setattr(Sizer, "drafts", lambda *args: drafts_at(*args) and next(rounds) % 7 == 0)
    for options in ({"num_assistant_tokens": 1}, AUTO | {"draft_costs": Costs([1], [1.0], 0.0)}):
        drafter, drafts = make_drafter(target), {}
        draft = drafter.draft

        def watched(unread, features, num_tokens, cache, *rest, draft=draft, drafts=drafts):
            logits = draft(unread, features, num_tokens, cache, *rest)
            drafts[cache.get_seq_length()] = (features.shape[1], logits[:1])
            return logits

        drafter.draft = watched
        drafted(target, drafter, prompt, max_new_tokens=40, **options)
        seen.append(drafts)
    every, some = seen
    common = [place for place in some if place in every]
    assert len([place for place in common if some[place][0] >= 7]) >= 3  # it had as many tokens to read at once
    for place in common:
        torch.testing.assert_close(some[place][1], every[place][1], atol=1e-4, rtol=1e-4)


def test_prompt_lookup_and_a_markov_head_are_sized_too():
    target, prompt = make_target("llama"), prompt_of(9)
    repeated = torch.cat([plain(target, prompt), prompt], dim=1)
    drafter = make_drafter(target, markov_rank=4)
    torch.nn.init.normal_(drafter.markov_head.next.weight)
    for costs in (CHEAP, DEAR):
        out = drafted(target, drafter, repeated, draft_costs=costs, prompt_lookup_num_tokens=6, **AUTO)
        assert torch.equal(out.sequences, plain(target, repeated)) and max(out.stats.nodes) > 0


# Targets and caches that are not made for trees


def test_a_static_cache_decodes():
    target, prompt = make_target("llama"), prompt_of(5)
    drafter, options = confident(scripted_for(target, prompt, "mixed")), {"cache_implementation": "static"}
    out = drafted(target, drafter, prompt, draft_costs=CHEAP, **AUTO, **options)
    assert torch.equal(out.sequences, plain(target, prompt, **options)) and max(out.stats.nodes) > 1


@pytest.mark.parametrize("markov_rank", [0, 4])
def test_a_target_that_cannot_verify_trees_gets_chains(markov_rank):
    target, drafter = make_other(gpt_neo)
    prompt = prompt_of(20)
    expected = plain(target, prompt)
    scripted = make_scripted(make_target("llama"), plain(target, prompt, max_new_tokens=40)[0].tolist(), [True, False])
    drafter.__class__ = type(scripted)
    drafter.reference, drafter.plan, drafter.offset, drafter.calls, drafter.drawn = (
        scripted.reference,
        [True],
        0,
        [],
        [],
    )
    with pytest.raises(ValueError, match="cannot verify a tree"):
        drafted(target, confident(drafter), prompt, draft_tree=6)
    for limit, depth in ((None, 8), (3, 3)):
        out = drafted(
            target, drafter, prompt, **AUTO | {"num_assistant_tokens": limit}, draft_costs=CHEAP, max_new_tokens=24
        )
        assert torch.equal(out.sequences, expected)
        assert out.stats.nodes == out.stats.drafted and max(out.stats.nodes) == depth


# Measuring


@pytest.fixture(autouse=True)
def measured_in_a_moment(monkeypatch):
    monkeypatch.setattr(sizing_peagle, "REPEATS", 2)


def test_measuring_leaves_everything_as_it_was(target):
    drafter, prompt = make_drafter(target), prompt_of(7)
    expected, state = plain(target, prompt), torch.get_rng_state()
    costs = measure_costs(target, drafter)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(plain(target, prompt), expected)
    assert (
        costs.rows == [1, 2, 4, 8, 16, 32]
        and min(costs.draft, *costs.target) > 0
        and costs.host == 0
        and costs.read >= 0
    )
    torch.manual_seed(5)
    sampled = plain(target, prompt, do_sample=True, max_new_tokens=8)
    torch.manual_seed(5)
    out = drafted(target, drafter, prompt, do_sample=True, max_new_tokens=8, **AUTO).sequences
    assert target in sizing_peagle.KNOWN
    assert torch.equal(out, sampled)


def test_a_forward_that_was_disturbed_is_not_dearer_than_one_over_more_rows(target):
    def disturb(module, args):
        time.sleep(0.1 * (args[0].shape[1] == 4))

    handle = target.model.layers[0].register_forward_pre_hook(disturb)
    try:
        costs = measure_costs(target, make_drafter(target))
    finally:
        handle.remove()
    assert costs.target == sorted(costs.target) and costs.target[-1] < 0.1


def test_a_pair_is_measured_once_until_it_changes():
    target = make_target("llama")
    drafter, other = make_drafter(target), make_drafter(target, num_hidden_layers=2)
    first = costs_of(target, drafter)
    assert costs_of(target, drafter) is first and costs_of(target, other) is not first
    with prepack(target):
        packed = costs_of(target, drafter)
        assert packed is not first and costs_of(target, drafter) is packed
    assert costs_of(target, drafter) is first
    target.to(torch.bfloat16), drafter.to(torch.bfloat16)
    assert costs_of(target, drafter) not in (first, packed)


def test_learned_positions_bound_what_is_measured():
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
    target, drafter = make_other(lambda: GPT2LMHeadModel(GPT2Config(**TOKENS, **sizes)))
    assert measure_costs(target, drafter).rows == [1, 2, 4, 8, 16]


# Settings


def test_nothing_set_means_auto_and_what_is_set_is_kept():
    target, prompt = make_target("llama"), prompt_of(5)
    drafter = confident(scripted_for(target, prompt, "right"))

    def stats(**options):
        with drafter.attach(target):
            options |= {"return_dict_in_generate": True, "draft_costs": options.get("draft_costs", asdict(CHEAP))}
            return plain(target, prompt, assistant_model=drafter, **options).stats

    auto = stats()
    assert target not in sizing_peagle.KNOWN  # costs that are given are not measured
    assert auto.drafted[0] == 8 and stats(draft_tree="auto").nodes == auto.nodes
    assert stats(generation_config=GenerationConfig(draft_tree="auto", max_new_tokens=24)).nodes == auto.nodes
    assert max(stats(draft_tree="auto", num_assistant_tokens=2).drafted) == 2
    chain = stats(num_assistant_tokens=3)
    assert set(chain.nodes[:-1]) == {3} and chain.nodes == chain.drafted
    assert set(stats(generation_config=GenerationConfig(num_assistant_tokens=3, max_new_tokens=24)).nodes[:-1]) == {3}
    assert max(stats(draft_tree=12).nodes) == 12 and max(stats(draft_tree=12).drafted) <= 4
    target.generation_config.num_assistant_tokens = 2
    assert set(stats().nodes[:-1]) == {2} and set(stats(num_assistant_tokens=None).nodes[:-1]) == {2}
    target.generation_config.num_assistant_tokens = None
    stats(draft_costs=None)
    assert target in sizing_peagle.KNOWN
    with pytest.raises(ValueError, match='or "auto"'):
        stats(draft_tree="wide")


def test_a_drafter_that_costs_more_than_it_can_save_is_never_asked():
    assert Sizer(Costs([1], [1.0], draft=100.0), 8, clocked=False).most == 0
    assert Sizer(Costs([1], [1.0], draft=7.9), 8, clocked=False).most == 63


@pytest.mark.parametrize("costs", [[1, 2], 3.0, "auto", {"rows": [1]}, {"rows": [], "target": [], "draft": 0.1}])
def test_costs_that_are_none_are_named(costs):
    target = make_target("llama")
    with pytest.raises(ValueError, match="draft_costs is|Costs need"):
        drafted(target, make_drafter(target), prompt_of(5), max_new_tokens=4, draft_tree="auto", draft_costs=costs)
