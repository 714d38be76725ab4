"""What else `generate` promises and a drafter must not change: returned values, caches, padding, threads, streamers."""

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
from test_generation import letter_tokenizer
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import verification_peagle
from configuration_peagle import PEagleConfig
from modeling_peagle import PEagleModel


@pytest.mark.parametrize("tree", [{}, {"draft_tree": 13}], ids=["chain", "tree"])
def test_scores_and_logits_are_those_of_plain_decoding(llama, tree):
    prompt = prompt_of(6)
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.5,
    }
    expected = plain(llama, prompt, **options)
    drafter = make_scripted(llama, expected.sequences[0].tolist(), PATTERNS["mixed"])
    out = drafted(llama, drafter, prompt, **options, **tree)
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
    monkeypatch.setattr(verification_peagle, "GROWTH", 3)
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
