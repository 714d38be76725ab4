"""Batches: the law of sampled rows, processors and criteria of each row, and what is refused by name."""

import pytest
import torch
import torch.nn.functional as F
from batch_helpers import Script, assert_greedy, batch_of
from conftest import (
    ROOT,
    VOCAB,
    Recorder,
    drafted,
    make_drafter,
    make_target,
    plain,
    prompt_of,
)
from test_generation import letter_tokenizer
from transformers import DynamicCache, LogitsProcessor


# Sampling


def joint_law(target, prompt, count=2):
    """The law of the next tokens, each one of the three most probable ones at the temperature 0.4."""
    if count == 0:
        return {(): 1.0}
    logits, tokens = target(prompt).logits[0, -1].topk(3)
    law = {}
    for token, p in zip(tokens.tolist(), (logits / 0.4).softmax(-1).tolist()):
        following = joint_law(target, torch.cat([prompt, torch.tensor([[token]])], dim=1), count - 1)
        law |= {(token, *rest): p * q for rest, q in following.items()}
    return law


def chi_square(rows, law):
    counts = dict.fromkeys(law, 0)
    for pair in rows:
        counts[tuple(pair)] += 1
    return sum((count - len(rows) * law[pair]) ** 2 / (len(rows) * law[pair]) for pair, count in counts.items())


@pytest.mark.parametrize("shape", [None, 6], ids=["chain", "tree"])
def test_sampled_rows_are_independent_and_have_the_law_of_the_target(monkeypatch, shape):
    target, prompt = make_target("llama", seed=4), prompt_of(5)
    options = {"do_sample": True, "top_k": 3, "temperature": 0.4, "max_new_tokens": 2, "num_return_sequences": 200}
    law = joint_law(target, prompt)
    torch.manual_seed(0)
    out = drafted(target, make_drafter(target), prompt, draft_tree=shape, **options)
    assert out.shape == (200, 7)
    bound = 27.9  # what a chi-square of 8 degrees of freedom exceeds once in 2,000 times
    assert chi_square(out[:, 5:].tolist(), law) < bound
    # A rule that keeps a draft token too often, and rows that share their draws, are seen.
    draw = torch.multinomial

    def biased(probabilities, num_samples):
        return draw(probabilities**3, num_samples)

    def shared(probabilities, num_samples):
        torch.manual_seed(7)
        return draw(probabilities, num_samples)

    for wrong in (biased, shared) if shape else ():
        monkeypatch.setattr("verification_peagle.torch.multinomial", wrong)
        torch.manual_seed(0)
        out = drafted(target, make_drafter(target), prompt, draft_tree=shape, **options)
        assert chi_square(out[:, 5:].tolist(), law) > bound


# Processors and criteria


def allowed(row, ids):
    return [token for token in range(6, VOCAB) if (token + row + len(ids)) % 4]


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[40], [58], [88, 75]]},
    "min_length": {"min_new_tokens": 4, "eos_token_id": list(range(40))},
    "decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": list(range(6, 12))},
    "prefix": {"prefix_allowed_tokens_fn": allowed},
}


OF_ROWS = ["repetition_penalty", "encoder_repetition_penalty", "encoder_no_repeat_ngram", "prefix"]


@pytest.mark.parametrize(
    ("name", "expanded"), [(name, False) for name in PROCESSORS] + [(name, True) for name in OF_ROWS]
)
def test_processors_see_their_own_row_and_its_number(monkeypatch, name, expanded):
    target, (ids, options) = make_target("llama"), batch_of([4, 9, 2])
    ids = plain(target, ids, **options)[:, 6:]  # so that what follows has been there before
    options["attention_mask"] = F.pad(options["attention_mask"], (0, 10), value=1)[:, 6:]
    options |= PROCESSORS[name]
    # Sampling of the most probable token alone.
    expand = {"do_sample": True, "top_k": 1, "num_return_sequences": 2} if expanded else {}
    expected = plain(target, ids, **options, **expand)
    mask = options["attention_mask"].repeat_interleave(2 if expanded else 1, dim=0)
    Script(monkeypatch, expected, mask, wide=True)
    out = drafted(target, make_drafter(target), ids, draft_tree=9, return_dict_in_generate=True, **options, **expand)
    assert torch.equal(out.sequences, expected)
    assert sum(out.stats.accepted) > 0
    assert not torch.equal(expected, plain(target, ids, **options | dict.fromkeys(PROCESSORS[name]), **expand))


@pytest.mark.parametrize("shape", [None, 0, 7])
def test_prompt_lookup_and_padding(monkeypatch, shape):
    target, (ids, options) = make_target("gemma3"), batch_of([3, 12])
    text, mask = plain(target, ids, **options), options["attention_mask"]
    ids = torch.cat([text, text[:, 12:]], dim=1)
    options["attention_mask"] = F.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    assert_greedy(monkeypatch, target, ids, options, draft_tree=shape, prompt_lookup_num_tokens=5)


def test_stop_strings_and_criteria_end_each_row(monkeypatch):
    target, (ids, options) = make_target("llama"), batch_of([4, 9, 2])
    reference = plain(target, ids, **options)
    strings = [chr(33 + reference[0, 13].item()), chr(33 + reference[2, 11].item())]
    settings = {
        "strings": {"stop_strings": strings, "tokenizer": letter_tokenizer()},
    }
    for own in settings.values():
        own |= {"eos_token_id": 1}
        expected = plain(target, ids, **options, **own)
        assert (expected[:, -1] == 0).any() and not torch.equal(expected, reference)
        with monkeypatch.context() as patch:
            Script(patch, reference, options["attention_mask"])
            assert torch.equal(drafted(target, make_drafter(target), ids, **options, **own), expected)


@pytest.mark.parametrize("kind", ["logits_processor", "stopping_criteria"])
def test_rules_of_ones_own_are_refused_as_they_may_look_at_other_rows(kind):
    target, (ids, options) = make_target("llama"), batch_of([4, 9])
    options |= {
        "eos_token_id": 1,
        kind: [lambda ids, scores, **_: scores if kind == "logits_processor" else ids[:, -1] < 0],
    }
    plain(target, ids, **options)
    with pytest.raises(ValueError, match="function is not of transformers .* one prompt at a time"):
        drafted(target, make_drafter(target), ids, **options)
    drafted(target, make_drafter(target), ids[1:], **options | {"attention_mask": None})


class OwnProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.roll(1, dims=-1)


class RowwiseProcessor(OwnProcessor):
    supports_continuous_batching = True


def test_a_processor_that_says_that_it_goes_by_the_scores_of_a_row_is_taken(monkeypatch):
    target, (ids, options) = make_target("llama"), batch_of([4, 9, 2])
    reference = plain(target, ids, **options)
    options["logits_processor"] = [RowwiseProcessor()]
    expected = plain(target, ids, **options)
    assert not torch.equal(expected, reference)
    Script(monkeypatch, expected, options["attention_mask"])
    assert torch.equal(drafted(target, make_drafter(target), ids, **options), expected)
    for silent in (OwnProcessor, type("Heir", (RowwiseProcessor,), {})):
        with pytest.raises(ValueError, match=f"{silent.__name__} is not of transformers"):
            drafted(target, make_drafter(target), ids, **options | {"logits_processor": [silent()]})


def test_the_cache_that_a_batch_does_not_return_may_be_passed_back():
    target, (ids, options) = make_target("llama"), batch_of([4, 9])
    drafter, options = make_drafter(target), options | {"return_dict_in_generate": True}
    out = drafted(target, drafter, ids, **options)
    assert out.cache is None
    more = torch.cat([out.sequences, prompt_of(2).expand(2, -1)], dim=1)
    mask = F.pad(options.pop("attention_mask"), (0, 12), value=1)
    expected = plain(target, more, attention_mask=mask, **options).sequences
    again = drafted(target, drafter, more, attention_mask=mask, cache=out.cache, **options)
    assert torch.equal(again.sequences, expected)


# The ways in


def test_without_attaching():
    target, (ids, options) = make_target("llama"), batch_of([4, 7])
    out = plain(
        target,
        ids,
        custom_generate=str(ROOT),
        trust_remote_code=True,
        assistant_model=make_drafter(target),
        **options,
    )
    assert torch.equal(out, plain(target, ids, **options))


def test_images(monkeypatch):
    """The prefill reads them; what follows is text."""
    target, (ids, options) = make_target("gemma3_composite"), batch_of([9, 12])
    target.model.multi_modal_projector.mm_input_projection_weight.data.normal_()
    ids[:, 4:8] = target.config.image_token_id
    options["token_type_ids"] = (ids == target.config.image_token_id).long()
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    expected = plain(target, ids, pixel_values=pixels, **options)
    assert not torch.equal(expected, plain(target, ids, pixel_values=pixels.flip(0), **options))
    Script(monkeypatch, expected, options["attention_mask"], wide=True)
    out = drafted(target, make_drafter(target), ids, pixel_values=pixels, draft_tree=8, **options)
    assert torch.equal(out, expected)


# Refusals


REFUSED = {
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "logits": ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
    "streamer": ({"streamer": Recorder()}, "streamer"),
    "cache": ({"cache": DynamicCache()}, "pass no cache"),
    "static": ({"cache_implementation": "static"}, "cache_implementation"),
    "guidance": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor counts the steps"),
    "right padding": ({"attention_mask": torch.tensor([[1] * 5, [1] * 4 + [0]])}, "pad on the left"),
    "hole": ({"attention_mask": torch.tensor([[1] * 5, [0, 1, 0, 1, 1]])}, "pad on the left"),
    "all hidden": ({"attention_mask": torch.tensor([[1] * 5, [0] * 5])}, "hides a whole prompt"),
    "no end": ({"stop_strings": "x", "tokenizer": letter_tokenizer()}, "StopStringCriteria"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_batch_cannot_do_is_refused_by_name(name):
    target, (settings, words) = make_target("llama"), REFUSED[name]
    with pytest.raises(ValueError, match=words):
        drafted(target, make_drafter(target), batch_of([5, 5])[0], **settings)


def test_targets_that_cannot_decode_a_batch_are_refused():
    target, ids = make_target("llama"), batch_of([5, 5])[0]
    target.config.attention_chunk_size = 4
    with pytest.raises(ValueError, match="chunked_attention: decode one prompt"):
        drafted(target, make_drafter(target), ids)
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="cannot decode a batch.*one prompt at a time"):
        drafted(target, make_drafter(target), ids)
