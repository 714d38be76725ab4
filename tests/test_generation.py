"""Decoding through `target.generate(..., assistant_model=drafter)`: the same tokens as plain decoding, always."""

import pytest
import torch
from conftest import (
    PATTERNS,
    VOCAB,
    Recorder,
    TinyTokenizer,
    drafted,
    make_drafter,
    make_scripted,
    plain,
    prompt_of,
    scripted_for,
)
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

from configuration_peagle import PEagleConfig
from modeling_peagle import PEagleModel


# Greedy identity


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 20])
def test_greedy_output_equals_plain_for_random_drafters(target, length):
    drafter, prompt = make_drafter(target, num_hidden_layers=2), prompt_of(length)
    assert torch.equal(drafted(target, drafter, prompt), plain(target, prompt))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("num_tokens", "length"), [(1, 8), (2, 21), (4, 3), (4, 8), (4, 21), (8, 3), (8, 21)])
def test_greedy_output_equals_plain_for_scripted_drafters(target, pattern, num_tokens, length):
    prompt = prompt_of(length)
    drafter = scripted_for(target, prompt, pattern)
    out = drafted(target, drafter, prompt, num_assistant_tokens=num_tokens, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain(target, prompt))
    kept = sum(out.stats.accepted)
    assert (kept > 0) == (pattern != "wrong")
    assert sum(out.stats.emitted) == out.sequences.shape[1] - length - 1
    if pattern == "right":  # every full round emits K drafts and the target's own token
        assert set(out.stats.emitted[:-1]) <= {num_tokens + 1}


@pytest.mark.parametrize("max_new_tokens", range(1, 10))
def test_max_new_tokens_is_kept_to_the_token(llama, max_new_tokens):
    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt, "right")
    recorder = Recorder()
    out = drafted(llama, drafter, prompt, max_new_tokens=max_new_tokens, streamer=recorder)
    assert torch.equal(out, plain(llama, prompt, max_new_tokens=max_new_tokens))
    assert recorder.tokens == out[0].tolist() and recorder.ended == 1


def test_a_drafter_of_another_width_with_its_own_embeddings_decodes(llama):
    prompt = prompt_of(9)
    for width in (16, 48):
        drafter = make_drafter(
            llama, hidden_size=width, own_embeddings=True, head_dim=8, draft_ids=torch.arange(3, 90)
        )
        assert torch.equal(drafted(llama, drafter, prompt), plain(llama, prompt))


def test_a_vocabulary_padded_differently_decodes(llama):
    config = PEagleConfig.for_target(llama, TinyTokenizer(), mask_token_id=5, vocab_size=VOCAB + 27)
    drafter = PEagleModel(config).eval()
    drafter.lm_head.weight.data[VOCAB:] = 100  # the padding scores best, and is no token of the target
    prompt = prompt_of(5)
    assert torch.equal(drafted(llama, drafter, prompt), plain(llama, prompt))


# What the drafter is fed


def fresh_features(target, drafter, tokens):
    states = target(tokens[None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i] for i in drafter.config.eagle_aux_hidden_state_layer_ids], dim=-1)


@pytest.mark.parametrize("length", [4, 13])
def test_the_drafter_is_fed_exactly_the_verified_tokens_and_features(target, length):
    prompt = prompt_of(length)
    drafter = scripted_for(target, prompt)
    out = drafted(target, drafter, prompt)[0]
    expected = fresh_features(target, drafter, out)
    position = 0
    for tokens, features, cached in drafter.calls:
        count = features.shape[1]
        assert torch.equal(tokens, out[position : position + count + 1])
        torch.testing.assert_close(features, expected[:, position : position + count], atol=2e-5, rtol=1e-4)
        position += count
        assert cached == position, "the drafter's cache holds something else than verified slots"
    assert len(drafter.calls) > 2


def test_incremental_drafts_equal_drafts_from_scratch(target):
    prompt = prompt_of(5)
    drafter = scripted_for(target, prompt)
    out = drafted(target, drafter, prompt)[0]
    table = target.get_input_embeddings().weight
    honest, seen = make_drafter(target), 0
    cache = DynamicCache(config=honest.config)
    for tokens, features, _ in drafter.calls:
        incremental = honest.draft(tokens, features, 4, cache, table)
        seen += features.shape[1]
        whole = fresh_features(target, drafter, out)[:, :seen]
        scratch = honest.draft(out[: seen + 1], whole, 4, DynamicCache(config=honest.config), table)
        torch.testing.assert_close(incremental, scratch, atol=1e-4, rtol=1e-4)


# Stopping


@pytest.mark.parametrize("place", range(1, 7))
def test_nothing_follows_an_end_token_inside_an_accepted_block(llama, place):
    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt, "right")
    end = drafter.reference[6 + place]
    for ends in (end, [VOCAB - 1, end]):
        recorder = Recorder()
        expected = plain(llama, prompt, eos_token_id=ends)
        out = drafted(llama, drafter, prompt, eos_token_id=ends, streamer=recorder)
        assert torch.equal(out, expected)
        assert recorder.tokens == expected[0].tolist() and recorder.ended == 1


class SumAbove(StoppingCriteria):
    """Stops where the sum of all tokens passes a limit: at any place of a block, and seen only token by token."""

    def __init__(self, limit):
        self.limit, self.lengths = limit, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return input_ids.sum(dim=-1) > self.limit


@pytest.mark.parametrize("extra", range(20, 400, 45))
def test_custom_criteria_are_asked_after_every_token(llama, extra):
    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt, "right")
    limit = prompt.sum().item() + extra
    ours, theirs = SumAbove(limit), SumAbove(limit)
    out = drafted(llama, drafter, prompt, stopping_criteria=StoppingCriteriaList([ours]))
    assert torch.equal(out, plain(llama, prompt, stopping_criteria=StoppingCriteriaList([theirs])))
    assert ours.lengths == theirs.lengths


def letter_tokenizer():
    letters = Tokenizer(models.BPE(vocab={chr(33 + i): i for i in range(VOCAB)}, merges=[]))
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters)


@pytest.mark.parametrize("place", range(1, 7))
def test_stop_strings_end_the_text_inside_an_accepted_block(llama, place):
    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt, "right")
    options = {"stop_strings": [chr(33 + drafter.reference[6 + place])], "tokenizer": letter_tokenizer()}
    recorder = Recorder()
    expected = plain(llama, prompt, **options)
    assert expected.shape[1] < 30
    assert torch.equal(drafted(llama, drafter, prompt, streamer=recorder, **options), expected)
    assert recorder.tokens == expected[0].tolist()


def test_stop_strings_of_a_generation_config_are_kept(llama):
    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt, "right")
    config = GenerationConfig(stop_strings=[chr(33 + drafter.reference[9])], do_sample=False, max_new_tokens=24)
    options = {"generation_config": config, "tokenizer": letter_tokenizer()}
    with drafter.attach(llama):
        out = llama.generate(prompt, assistant_model=drafter, **options)
    expected = llama.generate(prompt, **options)
    assert torch.equal(out, expected) and expected.shape[1] < 30
    assert config.stop_strings is not None


# Processors and sampling

PROCESSED = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.7},
    "repetition": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[7], [11, 12]]},
    "min_length": {"min_new_tokens": 12, "eos_token_id": 9},
    "forced_eos": {"forced_eos_token_id": 9, "eos_token_id": 9},
    "suppress": {"suppress_tokens": [3, 4, 17]},
}
ONLY_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "typical_p"}


@pytest.mark.parametrize("name", sorted(set(PROCESSED) - ONLY_SAMPLING))
def test_greedy_processors_see_the_history_of_their_own_path(llama, name):
    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt, "mixed", **PROCESSED[name])
    out = drafted(llama, drafter, prompt, return_dict_in_generate=True, **PROCESSED[name])
    assert torch.equal(out.sequences, plain(llama, prompt, **PROCESSED[name]))
    assert sum(out.stats.accepted) > 3


@pytest.mark.parametrize("name", PROCESSED)
def test_seeded_sampling_gives_the_very_tokens_of_plain_sampling(target, name):
    prompt, options = prompt_of(7), PROCESSED[name] | {"do_sample": True}
    torch.manual_seed(1)
    expected = plain(target, prompt, **options)
    drafter = make_scripted(target, expected[0].tolist(), PATTERNS["mixed"])
    path = [(0,) * depth for depth in (1, 2, 3, 4)]  # without it a chain is drawn
    torch.manual_seed(1)
    out = drafted(target, drafter, prompt, draft_tree=path, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, expected)
    assert sum(out.stats.accepted) > 0


def test_a_prefix_constraint_holds_on_every_path(llama):
    def allowed(batch, tokens):
        return [(int(tokens[-1]) + step) % VOCAB for step in (1, 2, 5)]

    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt, "mixed", prefix_allowed_tokens_fn=allowed)
    out = drafted(llama, drafter, prompt, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(out, plain(llama, prompt, prefix_allowed_tokens_fn=allowed))
