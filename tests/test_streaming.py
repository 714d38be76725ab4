# ruff: noqa: F811 (fixtures that are imported)
"""The engine's streams: their tokens, origins and texts, and what becomes of one that is left."""

import threading

import pytest
import torch
from conftest import make_drafter, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_inference import (  # noqa: F401
    IDS,
    PROMPT,
    TOKENIZER,
    TREE,
    any_engine,
    byte_fallback_tokenizer,
    engine,
    plain_tokens,
    target,
    told_by,
)

from configuration_peagle import tokenizer_fingerprint
from generation_peagle import PEAGLEInference
from inference_peagle import Generation
from streaming_peagle import TokenFeed


@pytest.mark.parametrize("draft_tree", [None, TREE], ids=["chain", "tree"])
def test_a_stream_gives_each_token_with_its_origin_and_then_the_result(any_engine, draft_tree):
    expected = plain_tokens(any_engine)
    stream = any_engine.stream(IDS, max_tokens=24, draft_tree=draft_tree)
    assert stream.result is None
    tokens = list(stream)
    assert [token.token for token in tokens] == expected == stream.result.tokens
    assert [token.depth for token in tokens] == stream.result.stats.origins == told_by(stream.result.stats)
    assert {token.depth for token in tokens} >= {None, 0, 1}
    assert "".join(token.text for token in tokens) == stream.result.text
    assert stream.result.text == TOKENIZER.decode(expected, skip_special_tokens=True)
    assert list(stream) == [] and stream.result.tokens == expected


def test_a_plain_stream_is_the_targets_own_and_counts_its_forwards(any_engine):
    any_engine.drafter.calls.clear()
    stream = any_engine.stream(IDS, max_tokens=24, plain=True, draft_tree=7)
    assert [(token.token, token.depth) for token in stream] == [(token, None) for token in plain_tokens(any_engine)]
    stats = stream.result.stats
    assert stats is stream.stats and stats.origins == told_by(stats) and stream.result.tau == 1
    assert len(stats.emitted) == 23 and not any(stats.nodes) and not any_engine.drafter.calls
    prefill, draft, verify, host, total = stream.result.timings.values()
    assert 0 < prefill < total == pytest.approx(prefill + verify) and draft == 0 and host == pytest.approx(0)
    sampled = any_engine.stream(IDS, max_tokens=12, plain=True, temperature=0.9)
    torch.manual_seed(0)
    tokens = [token.token for token in sampled]
    torch.manual_seed(0)
    expected = any_engine.target.generate(PROMPT, max_new_tokens=12, do_sample=True, temperature=0.9)
    assert tokens == expected[0, len(IDS) :].tolist()


STREAMED = {"byte level": TOKENIZER, "byte fallback": byte_fallback_tokenizer()}


def pieces(tokenizer, ids):
    feed = TokenFeed(tokenizer)
    for token in ids:
        feed.stats.origins.append(None)
        feed.put(torch.tensor([token]))
    feed.finish(Generation(tokenizer.decode(ids, skip_special_tokens=True), ids, feed.stats))
    streamed = [feed.queue.get() for _ in ids]
    assert [token.token for token in streamed] == ids
    return [token.text for token in streamed]


@pytest.mark.parametrize("name", STREAMED)
def test_no_text_has_half_a_character(name):
    text, tokenizer = "naïve, 100 €, 😀🏽 你好\n", STREAMED[name]
    ids = tokenizer(text)["input_ids"]
    # What a token alone would be decoded to: the case is one that a simpler rule gets wrong.
    assert "\ufffd" in "".join(tokenizer.decode([token]) for token in ids)
    streamed = pieces(tokenizer, ids)
    assert "".join(streamed) == tokenizer.decode(ids) and len([text for text in streamed if text]) > 4
    assert "\ufffd" not in "".join(streamed)


@pytest.mark.parametrize("name", STREAMED)
@settings(derandomize=True, deadline=None)
@given(data=st.data())
def test_the_texts_of_a_stream_are_the_whole_whatever_the_tokens(name, data):
    tokenizer = STREAMED[name]
    few = st.sampled_from([*"a€😀".encode(), 0xE2, 0xFF])  # parts of characters in any order
    # Two ids beyond the tokenizer: targets may have more rows.
    ids = data.draw(st.lists(few | st.integers(0, len(tokenizer) + 1), min_size=1, max_size=20))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_tokens_without_text_do_not_end_a_run_of_bytes():
    tokenizer = STREAMED["byte fallback"]
    for silent in (tokenizer.eos_token_id, len(tokenizer) + 1):
        ids = [*"a€".encode()[:2], silent, *"a€".encode()[2:], 0x61, silent, 0xE2]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("way", ["close", "break"])
def test_a_stream_that_is_left_stops_decoding_and_leaves_no_thread(engine, way):
    threads = threading.active_count()
    engine.drafter.calls.clear()
    if way == "close":
        stream = engine.stream(IDS, max_tokens=200)
        assert next(stream).token == plain_tokens(engine)[0]
        assert threading.active_count() == threads + 1
        stream.close()
        assert list(stream) == [] and stream.result is None
    else:
        for _ in engine.stream(IDS, max_tokens=200):
            break
    assert threading.active_count() == threads
    assert len(engine.drafter.calls) < 20  # at best each gives five of the 200 tokens
    assert engine.generate(IDS, max_tokens=24).tokens == plain_tokens(engine)


def test_a_stream_that_nobody_reads_starts_nothing(engine):
    threads = threading.active_count()
    stream = engine.stream(IDS)
    assert threading.active_count() == threads
    stream.close()


def test_an_error_in_decoding_reaches_the_reader(engine):
    def failing(input_ids, scores):
        if input_ids.shape[1] == len(IDS) + 5:
            raise RuntimeError("no sixth token")
        return scores

    threads, read = threading.active_count(), []
    with pytest.raises(RuntimeError, match="no sixth token"):
        for token in engine.stream(IDS, max_tokens=24, logits_processor=[failing]):
            read.append(token.token)
    # What is no whole character yet was not given out.
    assert read == plain_tokens(engine)[: len(read)] and threading.active_count() == threads
    with pytest.raises(ValueError, match="num_beams"):
        next(engine.stream(IDS, num_beams=2))
    assert "".join(token.text for token in engine.stream(IDS, max_tokens=24)) == engine.generate(IDS, 24).text


def test_streams_at_once_do_not_disturb_one_another(target):
    prompts = [prompt_of(length)[0].tolist() for length in (7, 12)]
    drafter = make_drafter(target, target_tokenizer_hash=tokenizer_fingerprint(TOKENIZER))
    engine, read = PEAGLEInference(drafter, target, tokenizer=TOKENIZER), {}
    expected = [plain_tokens(engine, prompt, 32) for prompt in prompts]
    start = threading.Barrier(2)

    def reader(number):
        start.wait()
        stream = engine.stream(prompts[number], max_tokens=32)
        read[number] = [token.token for token in stream], stream.result.stats

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [read[number][0] for number in range(2)] == expected
    assert all(stats.origins == told_by(stats) and len(stats.origins) == 32 for _, stats in read.values())
    # In one thread, in turn.
    both = list(zip(*(engine.stream(prompt, max_tokens=32) for prompt in prompts)))
    assert [[token.token for token in tokens] for tokens in zip(*both)] == expected
