"""Decoding with draft trees: the same tokens as plain decoding, and every node read as if its path were the only one."""

import pytest
import torch
from conftest import (
    PATTERNS,
    TARGETS,
    VOCAB,
    WINDOW,
    Recorder,
    drafted,
    make_drafter,
    make_scripted,
    make_target,
    plain,
    prompt_of,
    scripted_for,
)
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, StaticCache

import decoding_peagle
import verification_peagle
from tree_peagle import DraftTree


LENGTHS = [1, WINDOW - 1, WINDOW, WINDOW + 1, 21]
SHAPES = {
    **{str(nodes): nodes for nodes in (0, 1, 2, 5, 16, 31, 63)},
    "static": [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,), (0, 0, 0, 0), (1, 0, 0)],
}


def sure(drafter):
    """A scripted drafter whose trees are deep and wide: the scripted token is probable, and often another one more so."""
    draft = drafter.draft

    def with_decoys(*args):
        logits = 6 * draft(*args)
        for row in range(len(drafter.drawn) % 2, len(logits), 2):
            logits[row, VOCAB - 2 - row] += 6.5
        return logits

    drafter.draft = with_decoys
    return drafter


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    return make_target(request.param)


def assert_identical(target, length, shape, **options):
    """With a random drafter, and with scripted ones that are always, never and sometimes right."""
    prompt = prompt_of(length)
    expected = plain(target, prompt)
    drafters = [make_drafter(target, num_hidden_layers=2)]
    drafters += [sure(scripted_for(target, prompt, pattern)) for pattern in PATTERNS]
    for drafter in drafters:
        out = drafted(target, drafter, prompt, draft_tree=shape, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, expected)
        assert sum(out.stats.emitted) == out.sequences.shape[1] - length - 1
        assert max(out.stats.nodes) <= (shape if isinstance(shape, int) else len(shape))
    assert sum(out.stats.accepted) > 0 or shape == 0  # the last drafter is a good one


@pytest.mark.parametrize(("length", "shape"), [(WINDOW - 1, 16), (21, 5), (WINDOW, SHAPES["static"]), (1, 0)])
def test_greedy_output_equals_plain(target, length, shape):
    assert_identical(target, length, shape)


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_greedy_output_equals_plain_over_the_whole_grid(target, length, shape, num_tokens):
    if num_tokens == 4 or isinstance(shape, int):  # a static tree has its own depth
        assert_identical(target, length, shape, num_assistant_tokens=num_tokens)


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_every_depth_size_and_limit(num_tokens):
    target, prompt = make_target("gemma3"), prompt_of(6)
    drafter = sure(scripted_for(target, prompt, "mixed"))
    for nodes in (3, 9):
        for limit in (1, 2, num_tokens, num_tokens + 1, 2 * num_tokens + 1):
            recorder, options = Recorder(), {"max_new_tokens": limit, "num_assistant_tokens": num_tokens}
            out = drafted(target, drafter, prompt, draft_tree=nodes, streamer=recorder, **options)
            assert torch.equal(out, plain(target, prompt, max_new_tokens=limit))
            assert recorder.tokens == out[0].tolist() and recorder.ended == 1


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma3_composite"])
def test_eager_attention_verifies_trees_too(name):
    target, prompt = make_target(name), prompt_of(WINDOW + 3)
    target.set_attn_implementation("eager")
    drafter = sure(scripted_for(target, prompt, "mixed"))
    assert torch.equal(drafted(target, drafter, prompt, draft_tree=12), plain(target, prompt))


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3"])
def test_static_caches(name):
    target, prompt = make_target(name), prompt_of(5)
    drafter, options = sure(scripted_for(target, prompt, "mixed")), {"cache_implementation": "static"}
    for nodes in (5, 16):
        out = drafted(target, drafter, prompt, draft_tree=nodes, **options, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain(target, prompt, **options))
        assert max(out.stats.nodes) > 1


def test_a_dynamic_cache_that_knows_no_sliding_layers(target):
    prompt = prompt_of(5)
    drafter = sure(scripted_for(target, prompt, "mixed"))
    assert torch.equal(drafted(target, drafter, prompt, draft_tree=12, cache=DynamicCache()), plain(target, prompt))


def test_the_cache_can_be_passed_back(target):
    """A chat of several turns: the cache that a call returns goes into the next."""
    prompt, options = prompt_of(5), {"return_dict_in_generate": True, "max_new_tokens": 9}
    drafter = sure(scripted_for(target, prompt, "mixed"))
    first = drafted(target, drafter, prompt, draft_tree=12, **options)
    turn = torch.cat([first.sequences, prompt_of(4)], dim=1)
    drafter = sure(scripted_for(target, turn, "mixed"))
    drafter.offset = first.sequences.shape[1] - 1  # what the cache holds, the drafter does not read
    second = drafted(target, drafter, turn, draft_tree=12, cache=first.cache, **options)
    assert torch.equal(second.sequences, plain(target, turn, max_new_tokens=9))
    assert sum(second.stats.accepted) > 0


def test_left_padding(target):
    prompt = prompt_of(6)
    padded = torch.nn.functional.pad(prompt, (3, 0))
    options = {"attention_mask": torch.tensor([[0] * 3 + [1] * 6])}
    drafter = sure(scripted_for(target, prompt, "right"))
    out = drafted(target, drafter, padded, draft_tree=10, **options)
    assert torch.equal(out, plain(target, padded, **options))


class Watch:
    """Looks over the shoulder of one decoding: every verified tree with its logits, and the caches after each round."""

    def __init__(self, monkeypatch, target):
        self.target, self.rounds, self.kept = target, 0, []
        accept, keep = decoding_peagle.Continuation.accept, decoding_peagle.keep_path

        def watched_accept(text, logits, tree):
            read = text.sequence
            for node in range(len(tree.tokens) + 1):
                path = [tree.tokens[above - 1] for above in tree.path(node)[1:]]
                ids = torch.cat([read, read.new_tensor([path])], dim=1)
                expected = target(ids.long(), use_cache=False).logits[0, -1].float()
                torch.testing.assert_close(logits[node], expected, atol=2e-5, rtol=1e-5)
            self.rounds += len(tree.tokens) > 0
            self.text = text
            return accept(text, logits, tree)

        def watched_keep(cache, path, size):
            keep(cache, path, size)
            self.kept.append(len(path))
            fresh = DynamicCache(config=target.config)
            target(self.text.sequence[:, :-1].long(), cache=fresh)
            assert cache.get_seq_length() == fresh.get_seq_length() == self.text.length - 1
            for ours, theirs in zip(cache.layers, fresh.layers):
                rows = theirs.keys.shape[-2]
                for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                    torch.testing.assert_close(one[:, :, -rows:], other, atol=1e-4, rtol=1e-4)

        monkeypatch.setattr(decoding_peagle.Continuation, "accept", watched_accept)
        monkeypatch.setattr(decoding_peagle, "keep_path", watched_keep)


@pytest.mark.parametrize("length", [3, WINDOW, 20])
def test_every_node_is_read_as_its_path_and_the_cache_keeps_the_accepted_one(target, monkeypatch, length):
    prompt = prompt_of(length)
    drafter = sure(scripted_for(target, prompt, "mixed"))
    watch = Watch(monkeypatch, target)
    drafted(target, drafter, prompt, draft_tree=11, max_new_tokens=20)
    assert watch.rounds > 4 and len(set(watch.kept)) > 1


@pytest.mark.parametrize("fault", ["causal mask", "positions by number", "rows not moved"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_known_faults_of_tree_attention_are_seen(monkeypatch, fault, name):
    target, prompt = make_target(name), prompt_of(6)
    drafter = sure(scripted_for(target, prompt, "mixed"))
    if fault == "causal mask":
        causal = lambda tree: torch.ones(len(tree.tokens) + 1, len(tree.tokens) + 1).tril().bool()  # noqa: E731
        monkeypatch.setattr(DraftTree, "ancestors", causal)
    elif fault == "positions by number":
        spread = decoding_peagle.spread

        def wrong(model, inputs, tree, cache):
            start, rows = inputs["position_ids"][..., :1], torch.arange(len(tree.tokens) + 1)
            return spread(model, inputs, tree, cache) | {"position_ids": start + rows}

        monkeypatch.setattr(decoding_peagle, "spread", wrong)
    else:
        monkeypatch.setattr(decoding_peagle, "keep_path", lambda cache, path, size: cache.crop(len(path) - size))
    Watch(monkeypatch, target)
    with pytest.raises(AssertionError):
        drafted(target, drafter, prompt, draft_tree=11, max_new_tokens=20)


def test_the_drafter_is_fed_with_the_accepted_nodes(target):
    """After every round the drafter's input is what it would be had the accepted tokens been read alone."""
    prompt = prompt_of(9)
    drafter = sure(scripted_for(target, prompt, "mixed"))
    out = drafted(target, drafter, prompt, draft_tree=12)
    ids = drafter.config.eagle_aux_hidden_state_layer_ids
    states = target(out, output_hidden_states=True, use_cache=False).hidden_states
    expected = torch.cat([states[i] for i in ids], dim=-1)
    read = 0
    for unread, features, cached in drafter.calls:
        rows = features.shape[1]
        assert unread.tolist() == out[0, read : read + rows + 1].tolist()
        torch.testing.assert_close(features, expected[:, read : read + rows], atol=1e-4, rtol=1e-4)
        read += rows
        assert cached == read
    assert len(drafter.calls) > 3


# Sampling and processors


@pytest.mark.parametrize("shape", [4, 20, SHAPES["static"]], ids=["4", "20", "static"])
def test_a_seeded_sample_is_that_of_plain_sampling(target, shape):
    prompt, options = prompt_of(9), {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
    drafter = make_drafter(target)
    for seed in range(4):
        torch.manual_seed(seed)
        expected = plain(target, prompt, **options)
        torch.manual_seed(seed)
        assert torch.equal(drafted(target, drafter, prompt, draft_tree=shape, **options), expected)


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[7], [11, 12], [20]]},
    "min_length": {"min_new_tokens": 6, "eos_token_id": list(range(40))},
    "forced": {"forced_eos_token_id": 9},
    "suppressed": {"suppress_tokens": list(range(0, VOCAB, 3))},
    "min_p": {"do_sample": True, "min_p": 0.2},
    "typical_p": {"do_sample": True, "typical_p": 0.5},
}


@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS)
def test_processors_see_the_history_of_their_own_path(options):
    target, prompt = make_target("llama"), prompt_of(9)
    torch.manual_seed(3)
    expected = plain(target, prompt, **options)
    drafter = sure(make_scripted(target, [*expected[0].tolist(), *range(30)], PATTERNS["mixed"]))
    torch.manual_seed(3)
    out = drafted(target, drafter, prompt, draft_tree=14, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, expected)
    assert sum(out.stats.accepted) > 0


class Parity(LogitsProcessor):
    """Its choice depends on the whole text: only tokens whose parity is that of the text's sum."""

    def __call__(self, input_ids, scores):
        parity = (torch.arange(scores.shape[-1]) + input_ids.sum()) % 2
        return scores.masked_fill(parity.bool(), -torch.inf)


def test_a_processor_of_ones_own(target):
    prompt, processors = prompt_of(7), LogitsProcessorList([Parity()])
    expected = plain(target, prompt, logits_processor=processors)
    drafter = sure(make_scripted(target, [*expected[0].tolist(), *range(30)], PATTERNS["mixed"]))
    assert torch.equal(drafted(target, drafter, prompt, draft_tree=9, logits_processor=processors), expected)


# Prompt lookup


def test_what_followed_the_same_tokens_before_is_drafted_too(target):
    prompt = torch.tensor([[8, 9, 10, 11, 12, 13, 8, 9, 10]])
    reference = plain(target, prompt)
    repeated = torch.cat([reference, reference[:, :14]], dim=1)  # now the text says what comes
    expected = plain(target, repeated)
    for shape in (None, 6, 20):
        out = drafted(
            target,
            make_drafter(target),
            repeated,
            draft_tree=shape,
            prompt_lookup_num_tokens=6,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, expected)
        assert max(out.stats.nodes) <= (shape or 10)


def test_a_copied_text_is_accepted_through_the_lookup(monkeypatch):
    """A target that repeats a text, by a processor that forces it to."""
    target, text = make_target("llama"), list(range(20, 40))

    class Copy(LogitsProcessor):
        def __call__(self, input_ids, scores):
            follow = text[(text.index(input_ids[0, -1].item()) + 1) % len(text)]
            forced = torch.full_like(scores, -torch.inf)
            forced[0, follow] = 0
            return forced

    options = {"logits_processor": LogitsProcessorList([Copy()]), "return_dict_in_generate": True}
    taus = {}
    for lookup in (None, 8):
        out = drafted(
            target,
            make_drafter(target),
            torch.tensor([[*text, 20, 21]]),
            draft_tree=10,
            prompt_lookup_num_tokens=lookup,
            **options,
        )
        assert out.sequences[0, 20:].tolist() == (text * 3)[: out.sequences.shape[1] - 20]
        taus[lookup] = out.stats.tau
    assert taus[8] > 5 > taus[None]


# Settings


def test_the_shape_may_stand_in_a_generation_config():
    target, prompt = make_target("llama"), prompt_of(4)
    drafter = sure(scripted_for(target, prompt, "mixed"))
    settings = GenerationConfig(draft_tree=7, max_new_tokens=24, do_sample=False)
    with drafter.attach(target):
        out = target.generate(
            prompt, assistant_model=drafter, generation_config=settings, return_dict_in_generate=True
        )
        none = target.generate(
            prompt,
            assistant_model=drafter,
            generation_config=settings,
            draft_tree=None,
            num_assistant_tokens=3,
            return_dict_in_generate=True,
        )
    assert torch.equal(out.sequences, plain(target, prompt)) and max(out.stats.nodes) == 7
    assert torch.equal(none.sequences, out.sequences) and max(none.stats.nodes) == 3


# Refusals


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (-1, "draft_tree is -1"),
        (2.5, "draft_tree is 2.5"),
        (True, "draft_tree is True"),
        (10**9, "at most 4096, as the memory"),
        ([(0, 0)], r"\(0,\), which is missing"),
        ([(0,) * 9], "9 tokens deep"),
    ],
)
def test_impossible_trees_are_refused(shape, words):
    target = make_target("llama")
    with pytest.raises(ValueError, match=words):
        drafted(target, make_drafter(target), prompt_of(4), draft_tree=shape)


def test_a_static_cache_that_is_nearly_full_gets_smaller_trees():
    target, prompt = make_target("llama"), prompt_of(6)
    drafter = sure(scripted_for(target, prompt, "right"))
    cache = StaticCache(config=target.config, max_cache_len=16)
    out = drafted(target, drafter, prompt, draft_tree=30, cache=cache, max_new_tokens=10, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain(target, prompt, max_new_tokens=10))
    assert 1 < max(out.stats.nodes) <= 9


def test_a_cache_that_keeps_no_single_rows_is_refused_by_name():
    cache = DynamicCache()
    cache.layers.append(torch.nn.Identity())
    with pytest.raises(ValueError, match="Identity of this target's cache"):
        verification_peagle.check_cache(cache)
