"""Decoding through `target.generate(..., assistant_model=drafter)`: the same tokens as plain decoding, always."""

import itertools
import math
import threading

import pytest
import torch
from conftest import TARGETS, VOCAB, TinyTokenizer, make_drafter, make_scripted, make_target, prompt_of
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import generation_peagle
from configuration_peagle import PEagleConfig
from generation_peagle import Continuation
from modeling_peagle import PEagleModel


PATTERNS = {"right": [True], "wrong": [False], "mixed": [True, True, False, True, False, True, True, True, False]}


def plain(target, prompt, **kwargs):
    return target.generate(prompt, **{"do_sample": False, "max_new_tokens": 24} | kwargs)


def drafted(target, drafter, prompt, **kwargs):
    with drafter.attach(target):
        return plain(target, prompt, assistant_model=drafter, **kwargs)


def scripted_for(target, prompt, pattern="mixed", **kwargs):
    """A drafter that follows or leaves the target's own greedy continuation by a pattern."""
    reference = plain(target, prompt, **{"max_new_tokens": 40} | kwargs)[0].tolist()
    return make_scripted(target, reference, PATTERNS[pattern])


class Recorder(BaseStreamer):
    def __init__(self):
        self.tokens, self.puts, self.ended = [], 0, 0

    def put(self, value):
        self.puts += 1
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


# Greedy identity


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 20])
def test_greedy_output_equals_plain_for_random_drafters(target, length):
    drafter, prompt = make_drafter(target, num_hidden_layers=2), prompt_of(length)
    assert torch.equal(drafted(target, drafter, prompt), plain(target, prompt))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [3, 8, 21])
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
        drafter = make_drafter(llama, hidden_size=width, own_embeddings=True, head_dim=8, draft_ids=torch.arange(3, 90))
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


# The law of sampled output, by enumeration of every random outcome


class Undecided(Exception):
    """A script of random choices ended before the run did; `args[0]` is the number of next choices."""


def run_scripted(monkeypatch, script, rule, *arguments):
    """The tokens of one run whose random draws follow `script`, and the probability of these draws."""
    cursor, weights = iter(script), []

    def choose(probabilities, num_samples):
        probabilities = probabilities.flatten()
        choice = next(cursor, None)
        if choice is None:
            raise Undecided(len(probabilities))
        weights.append(probabilities[choice].item())
        return torch.tensor([[choice]])

    with monkeypatch.context() as patch:
        patch.setattr(generation_peagle.torch, "multinomial", choose)
        return rule(*arguments), math.prod(weights)


def enumerate_law(monkeypatch, rule, table, drafts_of, count):
    """The exact joint law of the first `count` tokens that a verifier emits, as `{tokens: probability}`: all scripts of
    random choices are tried."""
    law, pending = {}, [()]
    while pending:
        script = pending.pop()
        try:
            tokens, weight = run_scripted(monkeypatch, script, rule, table, drafts_of, count)
            law[tokens] = law.get(tokens, 0.0) + weight
        except Undecided as undecided:
            pending += [(*script, choice) for choice in range(undecided.args[0])]
    return law


def ours(table, drafts_of, count):
    """Rounds of our accept rule on a target given as a table `path -> logits`."""
    config = GenerationConfig(do_sample=True, max_length=1 + count)
    text = Continuation(
        torch.zeros((1, 1), dtype=torch.long),
        LogitsProcessorList(),
        StoppingCriteriaList([lambda ids, scores, **_: torch.tensor([ids.shape[1] > count])]),
        config,
        None,
    )
    while not text.stopped:
        path = tuple(text.sequence[0, 1:].tolist())
        drafts = drafts_of(path)
        logits = torch.stack([table[path + tuple(drafts[:i])] for i in range(len(drafts) + 1)])
        text.accept(logits, drafts)
    return tuple(text.sequence[0, 1:].tolist())


def skips_the_first_check(table, drafts_of, count):
    """A known fault: the first draft token is kept without asking the target."""
    tokens = ()
    while len(tokens) < count:
        tokens += (drafts_of(tokens)[0],)
        probabilities = table[tokens].softmax(-1)
        tokens += (torch.multinomial(probabilities[None], num_samples=1).item(),)
    return tokens[:count]


def toy():
    vocabulary, generator = 3, torch.Generator().manual_seed(0)
    paths = [p for n in range(7) for p in itertools.product(range(vocabulary), repeat=n)]
    table = {path: torch.randn(vocabulary, generator=generator, dtype=torch.float64) for path in paths}

    def drafts_of(path):  # a deterministic drafter, as ours is
        return [(sum(path) + 1) % vocabulary, (len(path) + 2) % vocabulary, 0]

    def law_of(count):
        law = {}
        for tokens in itertools.product(range(vocabulary), repeat=count):
            weight = 1.0
            for i, token in enumerate(tokens):
                weight *= table[tokens[:i]].softmax(-1)[token].item()
            law[tokens] = weight
        return law

    return table, drafts_of, law_of


def total_variation(a, b):
    return sum(abs(a.get(key, 0) - b.get(key, 0)) for key in a.keys() | b.keys()) / 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sampled_output_has_exactly_the_law_of_the_target(monkeypatch, count):
    table, drafts_of, law_of = toy()
    law = enumerate_law(monkeypatch, ours, table, drafts_of, count)
    assert total_variation(law, law_of(count)) < 1e-12


def test_the_enumeration_catches_a_wrong_rule(monkeypatch):
    table, drafts_of, law_of = toy()
    law = enumerate_law(monkeypatch, skips_the_first_check, table, drafts_of, 2)
    assert total_variation(law, law_of(2)) > 0.05


# What generate returns, caches, padding


def test_scores_and_logits_are_those_of_plain_decoding(llama):
    prompt = prompt_of(6)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.5}
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


# Attaching


def test_attach_is_idempotent_and_a_context_manager_that_restores(llama):
    drafter, other = make_drafter(llama), make_drafter(llama, seed=1)
    assert "generate" not in vars(llama)
    with drafter.attach(llama):
        installed = llama.generate
        with drafter.attach(llama):
            assert llama.generate is installed
        assert llama.generate is installed
        with other.attach(llama):
            prompt = prompt_of(4)
            assert torch.equal(plain(llama, prompt, assistant_model=drafter), plain(llama, prompt, assistant_model=other))
    assert "generate" not in vars(llama)


def test_attaching_brings_the_drafter_to_the_dtype_of_the_target(llama):
    drafter, prompt = make_drafter(llama).to(torch.float16), prompt_of(6)
    assert torch.equal(drafted(llama, drafter, prompt), plain(llama, prompt))
    assert drafter.dtype == torch.float32


def test_half_precision_targets_decode():
    target, prompt = make_target("llama").to(torch.bfloat16), prompt_of(6)
    out = drafted(target, make_drafter(target), prompt, return_dict_in_generate=True)
    assert out.sequences.shape == (1, 30) and out.stats.drafted


def test_the_target_is_restored_after_an_error(llama):
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        drafted(llama, make_drafter(llama), prompt_of(4), num_assistant_tokens=99)
    assert "generate" not in vars(llama)


def test_positional_arguments_of_generate_are_understood(llama):
    prompt, config = prompt_of(4), GenerationConfig(max_new_tokens=5, do_sample=False)
    drafter = make_drafter(llama)
    with drafter.attach(llama):
        arguments = (prompt, config, None, None, None, None, drafter)
        assert torch.equal(llama.generate(*arguments), plain(llama, prompt, max_new_tokens=5))


def test_a_static_cache_without_a_window_decodes(llama):
    prompt, options = prompt_of(6), {"cache_implementation": "static", "return_dict_in_generate": True}
    drafter = scripted_for(llama, prompt)
    out = drafted(llama, drafter, prompt, **options)
    assert torch.equal(out.sequences, plain(llama, prompt)) and sum(out.stats.accepted) > 3


def test_plain_generation_of_an_attached_target_is_untouched(llama):
    prompt = prompt_of(4)
    expected = plain(llama, prompt, num_beams=2)
    make_drafter(llama).attach(llama)
    assert torch.equal(plain(llama, prompt, num_beams=2), expected)


# Errors


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_assistant_tokens": 9}, "trained for 1 to 8"),
        ({"use_cache": False}, "use_cache"),
        ({"num_beams": 2}, "num_beams"),
        ({"do_sample": True, "num_return_sequences": 2}, "one sequence at a time"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states"),
        ({"stop_strings": ["x"]}, "tokenizer"),
        ({"prefill_chunk_size": 2}, "prefill_chunk_size"),
    ],
)
def test_what_cannot_be_decoded_exactly_is_refused_by_name(llama, kwargs, message):
    with pytest.raises(ValueError, match=message):
        drafted(llama, make_drafter(llama), prompt_of(5), **kwargs)


def test_bad_prompts_are_refused(llama):
    drafter = make_drafter(llama)
    with pytest.raises(ValueError, match="one sequence at a time"):
        drafted(llama, drafter, prompt_of(5).expand(2, -1))
    with pytest.raises(ValueError, match="limit is 512"):
        drafted(llama, drafter, prompt_of(513))
    with pytest.raises(ValueError, match="empty"):
        drafted(llama, drafter, torch.empty((1, 0), dtype=torch.long))
    with pytest.raises(ValueError, match="input_ids"):
        with drafter.attach(llama):
            llama.generate(inputs_embeds=torch.randn(1, 4, 32), assistant_model=drafter, max_new_tokens=4)


def test_an_unattached_drafter_says_so(llama):
    with pytest.raises(AttributeError, match="drafter.attach"):
        plain(llama, prompt_of(4), assistant_model=make_drafter(llama))


def test_a_cache_that_cannot_forget_is_refused_by_name():
    target = make_target("gemma3")
    with pytest.raises(ValueError, match="StaticCache"):
        drafted(target, make_drafter(target), prompt_of(4), cache_implementation="static")


def test_every_kind_of_target_is_covered():
    assert {"llama", "qwen3", "gemma3", "gemma3_composite"} <= TARGETS.keys()
