"""Decoding through `target.generate(..., assistant_model=drafter)`: the same tokens as plain decoding, always."""

import threading

import pytest
import torch
from conftest import (
    PATTERNS,
    VOCAB,
    WINDOW,
    Recorder,
    TinyTokenizer,
    drafted,
    make_drafter,
    make_scripted,
    make_target,
    plain,
    prompt_of,
    scripted_for,
)
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import generation_peagle
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
    torch.manual_seed(1)
    out = drafted(target, drafter, prompt, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, expected)
    assert sum(out.stats.accepted) > 0


def test_a_prefix_constraint_holds_on_every_path(llama):
    def allowed(batch, tokens):
        return [(int(tokens[-1]) + step) % VOCAB for step in (1, 2, 5)]

    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt, "mixed", prefix_allowed_tokens_fn=allowed)
    out = drafted(llama, drafter, prompt, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(out, plain(llama, prompt, prefix_allowed_tokens_fn=allowed))


# What generate returns, caches, padding


def test_scores_and_logits_are_those_of_plain_decoding(llama):
    prompt = prompt_of(6)
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.5,
    }
    expected = plain(llama, prompt, **options)
    drafter = make_scripted(llama, expected.sequences[0].tolist(), PATTERNS["mixed"])
    out = drafted(llama, drafter, prompt, **options)
    for ours_, theirs in ((out.scores, expected.scores), (out.logits, expected.logits)):
        assert len(ours_) == len(theirs) == 24
        torch.testing.assert_close(torch.cat(ours_), torch.cat(theirs), atol=1e-4, rtol=1e-4)


def test_the_returned_cache_continues_the_conversation(target):
    first, second = prompt_of(6), prompt_of(3, seed=7)
    drafter = scripted_for(target, first)
    out = drafted(target, drafter, first, return_dict_in_generate=True)
    assert out.cache.get_seq_length() == out.sequences.shape[1] - 1
    longer = torch.cat([out.sequences, second], dim=1)
    expected = plain(target, longer)
    again = make_drafter(target)
    assert torch.equal(drafted(target, again, longer, cache=out.cache), expected)


def test_left_padding_changes_nothing(target):
    prompt = prompt_of(9)
    padded = torch.cat([torch.zeros((1, 3), dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(12) >= 3).long()[None]
    reference = plain(target, padded, attention_mask=mask)
    drafter = make_scripted(target, reference[0].tolist(), PATTERNS["mixed"], offset=3)
    out = drafted(target, drafter, padded, attention_mask=mask, return_dict_in_generate=True)
    assert torch.equal(out.sequences, reference)
    assert sum(out.stats.accepted) > 3
    # the drafter never sees the padding
    assert torch.equal(drafter.calls[0][0], reference[0, 3:13])


def test_the_target_keeps_its_generation_config(llama):
    prompt = prompt_of(5)
    before = llama.generation_config.to_dict()
    drafted(llama, make_drafter(llama), prompt, temperature=0.5, do_sample=True, num_assistant_tokens=3)
    assert llama.generation_config.to_dict() == before


def test_two_threads_share_one_target_and_one_drafter(llama):
    drafter, prompts = make_drafter(llama), [prompt_of(5), prompt_of(11)]
    expected, results = [plain(llama, prompt) for prompt in prompts], {}
    drafter.attach(llama)

    def work(i):
        results[i] = [plain(llama, prompts[i], assistant_model=drafter) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert all(torch.equal(out, expected[i]) for out in results[i]) and len(results[i]) == 5


def test_half_precision_targets_decode():
    target, prompt = make_target("llama").to(torch.bfloat16), prompt_of(6)
    out = drafted(target, make_drafter(target), prompt, return_dict_in_generate=True)
    assert out.sequences.shape == (1, 30) and out.stats.drafted


def test_a_static_cache_without_a_window_decodes(llama):
    prompt, options = prompt_of(6), {"cache_implementation": "static", "return_dict_in_generate": True}
    drafter = scripted_for(llama, prompt)
    out = drafted(llama, drafter, prompt, **options)
    assert torch.equal(out.sequences, plain(llama, prompt)) and sum(out.stats.accepted) > 3


def test_a_static_cache_that_ends_where_a_criterion_does_decodes(llama):
    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt, "right")
    cache = StaticCache(config=llama.config, max_cache_len=12)  # the 13th token is not read any more
    stop = StoppingCriteriaList([lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 13])])
    out = drafted(llama, drafter, prompt, cache=cache, stopping_criteria=stop)
    assert torch.equal(out, plain(llama, prompt, max_new_tokens=7))


@pytest.mark.parametrize("limit", [9, 40])
def test_a_length_criterion_of_the_user_takes_the_place_of_max_new_tokens(llama, limit):
    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt, "right")
    options = {"max_new_tokens": 12, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(limit)])}
    out = drafted(llama, drafter, prompt, **options)
    assert torch.equal(out, plain(llama, prompt, **options)) and out.shape[1] == limit


def test_the_text_may_outgrow_its_first_buffer(llama, monkeypatch):
    monkeypatch.setattr(generation_peagle, "GROWTH", 3)
    prompt = prompt_of(2)
    assert torch.equal(drafted(llama, scripted_for(llama, prompt), prompt), plain(llama, prompt))


def test_a_limit_far_away_takes_no_memory(llama):
    prompt = prompt_of(6)
    drafter = scripted_for(llama, prompt)
    options = {"max_new_tokens": 10**12, "eos_token_id": drafter.reference[20]}
    assert torch.equal(drafted(llama, drafter, prompt, **options), plain(llama, prompt, **options))


class Broken(StoppingCriteria):
    """Fails inside a block of accepted tokens."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.length:
            raise RuntimeError("broken")
        return torch.tensor([False])


@pytest.mark.parametrize("length", [7, 9, 12, 16])
def test_after_an_exception_the_cache_of_the_user_holds_no_unverified_token(target, length):
    prompt, cache = prompt_of(6), DynamicCache(config=target.config.get_text_config())
    drafter = scripted_for(target, prompt)
    with pytest.raises(RuntimeError, match="broken"):
        drafted(target, drafter, prompt, cache=cache, stopping_criteria=StoppingCriteriaList([Broken(length)]))
    assert cache.get_seq_length() == length - 1
    going_on = torch.tensor([drafter.reference[:length]])
    assert torch.equal(plain(target, going_on, cache=cache), plain(target, going_on))


def test_the_returned_cache_stops_keeping_what_left_the_window():
    target, prompt = make_target("gemma3"), prompt_of(6)
    out = drafted(target, make_drafter(target), prompt, return_dict_in_generate=True)
    longer = torch.cat([out.sequences, prompt_of(3)], dim=1)
    plain(target, longer, cache=out.cache)
    assert (
        max(layer.keys.shape[-2] for layer, sliding in zip(out.cache.layers, out.cache.is_sliding) if sliding) < WINDOW
    )


def test_streamers_may_keep_what_they_are_given(llama):
    class Keeper(Recorder):
        def put(self, value):
            self.tokens.append(value)

    prompt, keeper = prompt_of(4), Keeper()
    out = drafted(llama, make_drafter(llama), prompt, streamer=keeper)
    kept = keeper.tokens[1:]
    assert torch.equal(torch.cat(kept), out[0, 4:])
    kept[0].zero_()
    assert torch.equal(out, plain(llama, prompt))


def test_stop_string_criteria_of_the_user_take_the_place_of_stop_strings(llama):
    prompt, tokenizer = prompt_of(6), letter_tokenizer()
    drafter = scripted_for(llama, prompt, "right")
    own = StoppingCriteriaList([StopStringCriteria(tokenizer, chr(33 + drafter.reference[12]))])
    options = {"stop_strings": chr(33 + drafter.reference[8]), "tokenizer": tokenizer, "stopping_criteria": own}
    assert torch.equal(drafted(llama, drafter, prompt, **options), plain(llama, prompt, **options))


def test_stop_strings_of_the_target_are_kept(llama):
    prompt, tokenizer = prompt_of(6), letter_tokenizer()
    drafter = scripted_for(llama, prompt, "right")
    llama.generation_config.stop_strings = [chr(33 + drafter.reference[9])]
    for options in ({}, {"generation_config": GenerationConfig(max_new_tokens=24, do_sample=False)}):
        with drafter.attach(llama):
            out = llama.generate(prompt, assistant_model=drafter, tokenizer=tokenizer, max_new_tokens=24, **options)
        assert torch.equal(out, llama.generate(prompt, tokenizer=tokenizer, max_new_tokens=24, **options))
        assert out.shape[1] < 20
    assert llama.generation_config.stop_strings is not None


def test_int32_prompts_give_what_plain_decoding_gives(llama):
    prompt = prompt_of(6).int()
    out, expected = drafted(llama, make_drafter(llama), prompt), plain(llama, prompt)
    assert torch.equal(out, expected) and out.dtype == expected.dtype


def test_a_drafter_whose_own_table_lacks_padding_rows_decodes(llama):
    config = PEagleConfig.for_target(
        llama, TinyTokenizer(), mask_token_id=5, vocab_size=VOCAB - 20, own_embeddings=True
    )
    drafter, prompt = PEagleModel(config), prompt_of(6)
    bias = LogitsProcessorList([lambda ids, scores: scores + 1e4 * (torch.arange(VOCAB) >= VOCAB - 20)])
    expected = plain(llama, prompt, logits_processor=bias)
    assert expected[0, 6:].min() >= VOCAB - 20
    assert torch.equal(drafted(llama, drafter, prompt, logits_processor=bias), expected)


def test_a_sliding_window_in_the_drafters_config_changes_nothing(llama):
    drafter, prompt = make_drafter(llama), prompt_of(12)
    drafter.config.sliding_window = 4
    assert torch.equal(drafted(llama, drafter, prompt), plain(llama, prompt))


def test_a_warm_static_cache_with_the_new_tokens_alone_decodes(llama):
    stop = StoppingCriteriaList([lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 10])])
    outputs = []
    for decode in (plain, lambda *args, **kwargs: drafted(*args[:1], make_drafter(llama), *args[1:], **kwargs)):
        cache = StaticCache(config=llama.config, max_cache_len=20)
        first = plain(llama, prompt_of(6), cache=cache, max_new_tokens=5)
        new = torch.cat([first, prompt_of(3)], dim=1)[:, 10:]
        mask = torch.ones(1, 14, dtype=torch.long)
        outputs.append(decode(llama, new, cache=cache, attention_mask=mask, max_new_tokens=50, stopping_criteria=stop))
    assert torch.equal(*outputs)


def test_new_tokens_that_are_all_masked_decode(llama):
    outputs = []
    for drafter in (None, make_drafter(llama)):
        cache = DynamicCache(config=llama.config)
        first = plain(llama, prompt_of(6), cache=cache, max_new_tokens=5)
        longer = torch.cat([first, prompt_of(3)], dim=1)
        mask = (torch.arange(longer.shape[1]) < 10).long()[None]
        options = {"cache": cache, "attention_mask": mask, "num_assistant_tokens": 1}
        outputs.append(drafted(llama, drafter, longer, **options) if drafter else plain(llama, longer, **options))
    assert torch.equal(*outputs)


def test_criteria_are_asked_before_the_streamer_gets_a_token(llama):
    prompt, lengths = prompt_of(6), []
    for drafter in (None, scripted_for(llama, prompt, "right")):
        recorder = Recorder()
        shown = StoppingCriteriaList([lambda ids, scores, r=recorder, **_: torch.tensor([len(r.tokens) >= 12])])
        options = {"streamer": recorder, "stopping_criteria": shown}
        out = drafted(llama, drafter, prompt, **options) if drafter else plain(llama, prompt, **options)
        lengths.append(out.shape[1])
    assert lengths == [13, 13]


def test_stop_strings_none_turns_those_of_the_target_off(llama):
    prompt, tokenizer = prompt_of(6), letter_tokenizer()
    drafter = scripted_for(llama, prompt, "right")
    llama.generation_config.stop_strings = [chr(33 + drafter.reference[9])]
    for options in ({}, {"tokenizer": tokenizer}):
        assert drafted(llama, drafter, prompt, stop_strings=None, **options).shape[1] == 30


def test_a_subclass_of_stop_string_criteria_stands_beside_stop_strings(llama):
    class Own(StopStringCriteria):
        pass

    prompt, tokenizer = prompt_of(6), letter_tokenizer()
    drafter = scripted_for(llama, prompt, "right")
    own = StoppingCriteriaList([Own(tokenizer, chr(33 + drafter.reference[12]))])
    options = {"stop_strings": chr(33 + drafter.reference[8]), "tokenizer": tokenizer, "stopping_criteria": own}
    expected = plain(llama, prompt, **options)
    assert torch.equal(drafted(llama, drafter, prompt, **options), expected) and expected.shape[1] < 12


def test_hidden_states_that_nobody_gets_do_not_matter(llama):
    prompt = prompt_of(6)
    out = drafted(llama, make_drafter(llama), prompt, output_hidden_states=True)
    assert torch.equal(out, plain(llama, prompt))
