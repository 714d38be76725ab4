"""The Space: what its handlers and its served page show is true of the decoding, for each visitor alone."""

import functools
import importlib
import re
import sys
import threading
import types
from html import unescape

import gradio as gr
import pytest
import torch
from chats import CHATML
from conftest import PATTERNS, make_scripted, plain
from gradio_client import Client
from test_evaluate import make_tokenizer, wrong_accept
from test_inference import BUILDERS, sharpened

import app
import decoding_peagle
from configuration_peagle import tokenizer_fingerprint


TOKENIZER = make_tokenizer()
TOKENIZER.chat_template = CHATML
HELLO = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
COUNT = 16
SETTINGS = {"system": "", "tools": "", "drafting": app.CHAIN, "depth": 4, "nodes": 9, "temperature": 0.0}
SETTINGS |= {"max_tokens": COUNT, "order": "plain first"}
TOOL = '[{"name": "get_tide", "parameters": {"type": "object"}}]'


def pair(family="llama", pattern="mixed"):
    """A drafter that is right about the answer to HELLO by a pattern, its target, and the tokenizer of both."""
    target = sharpened(BUILDERS[family])
    reference = plain(target, torch.tensor([TOKENIZER(HELLO)["input_ids"]]), max_new_tokens=40)[0].tolist()
    drafter = make_scripted(target, reference, PATTERNS[pattern])
    drafter.config.target_tokenizer_hash = tokenizer_fingerprint(TOKENIZER)
    return drafter, target, TOKENIZER


def loaded(*of_pair):
    drafter, target, tokenizer = pair(*of_pair)
    return app.load(drafter, target, tokenizer=tokenizer)


loaded_once = functools.cache(loaded)


@pytest.fixture
def engine():
    return loaded_once("llama")


def states(engine, message="Hello", turns=(), **settings):
    return list(app.answer(engine, list(turns), message, **SETTINGS | settings))


def plain_text(engine, prompt=HELLO, max_tokens=COUNT):
    ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
    return TOKENIZER.decode(
        plain(engine.target, ids, max_new_tokens=max_tokens)[0, ids.shape[1] :], skip_special_tokens=True
    )


def texts(page):
    """The text that each column shows, by the class of the column."""
    columns = re.findall(r'<section class="column (\w+)">.*?<div class="text" dir="auto">(.*?)</div>', page, re.DOTALL)
    return {way: unescape(re.sub("<[^>]*>", "", text)) for way, text in columns}


def as_shown(text):
    return text.translate(app.CONTROLS)


# What is shown


@pytest.mark.parametrize(
    "family, drafting",
    [("llama", app.AUTO), ("llama", app.CHAIN), ("llama", app.TREE), ("qwen3", app.CHAIN), ("gemma3", app.TREE)],
)
def test_both_columns_stream_to_the_text_of_plain_decoding(family, drafting, monkeypatch):
    monkeypatch.setattr(app, "INTERVAL", 0.0)
    engine = loaded_once(family)
    *stream, last = states(engine, drafting=drafting)
    _, page, turns, message = last
    expected = plain_text(engine)
    assert texts(page) == dict.fromkeys(app.WAYS, as_shown(expected)) and message == ""
    assert f"✓ outputs identical: {COUNT} of {COUNT} tokens" in page and 'class="verdict same"' in page
    for way in app.WAYS:
        seen = [texts(page)[way] for _, page, _, _ in stream]
        assert len(set(seen)) > 2 and all(later.startswith(sooner) for sooner, later in zip(seen, seen[1:]))
    numbers = {way: turns[-1].answers[way] for way in app.WAYS}
    assert numbers["plain"].forwards == COUNT and numbers["plain"].stats.tau == 1
    assert [token.depth for token in numbers["drafted"].tokens] == numbers["drafted"].stats.origins
    if drafting != app.AUTO:  # which drafts by the clock
        drafted = numbers["drafted"]
        assert (
            f"{COUNT - drafted.forwards} saved · tau <b>{drafted.stats.tau:.2f}</b>" in page
            and drafted.forwards < COUNT
        )
        assert 'class="d0" title="depth 1"' in page and page.count('class="bar d') == len(drafted.kept_per_depth) > 0


def test_colours_are_those_of_the_depths_that_drafted_the_tokens(engine):
    _, page, turns, _ = states(engine)[-1]
    drafted = page.split('class="column drafted"')[1]
    coloured = [int(depth) for depth in re.findall(r'<span class="d(\d)" title', drafted)]
    origins = turns[-1].answers["drafted"].stats.origins
    assert coloured == [depth for depth in origins if depth is not None] and {0, 1} <= set(coloured)
    assert '<span class="d' not in page.split('class="column drafted"')[0]


def test_the_bars_are_the_shares_of_kept_drafts(engine):
    _, page, turns, _ = states(engine)[-1]
    stats = turns[-1].answers["drafted"].stats
    expected = []
    for depth in range(4):
        kept, tried = stats.depth_counts(depth)
        expected.append(f"{kept / tried:.0%}")
    assert re.findall(r'<span class="bar d\d" style="width: \d+%">(\d+%)</span>', page) == expected
    assert len(set(expected)) > 1


def test_the_badge_is_computed(engine, monkeypatch):
    assert 'class="verdict open">sampled' in states(engine, temperature=0.8)[-1][1]
    assert 'class="verdict open">so far nothing to compare' in states(engine, max_tokens=2)[0][1]
    monkeypatch.setattr(decoding_peagle.Continuation, "accept", wrong_accept)
    page = states(engine)[-1][1]
    assert 'class="verdict differ">✗ outputs differ from new token 1 on<' in page and "identical" not in page


def test_an_answer_of_one_token_has_no_pace(engine):
    """Sampled answers may differ in length: either column may stop at once."""
    _, page, turns, _ = states(engine)[-1]
    assert re.search(r"\d\.\d\dx plain, in this one run", page)
    for way in app.WAYS:
        turn = app.Turn("Hello", ("plain", "drafted"), 0.8, "float32", dict(turns[-1].answers))
        turn.answers[way] = states(engine, max_tokens=1)[-1][2][-1].answers[way]
        page = turn.html()
        assert (
            len(turn.answers[way].ids) == 1
            and "<b>–</b> tokens/s · 1 token · 1 target forward" in page
            and "tau <b>0.00" not in page
        )
        assert "x plain" not in page and "<b>0.0</b>" not in page


def test_an_answer_that_is_only_longer_differs():
    turn = app.Turn("Hello", ("plain", "drafted"), 0.0, "bfloat16")
    for way, count in (("plain", 2), ("drafted", 3)):
        turn.answers[way].tokens = [app.StreamedToken(7, "a", None)] * count
    assert turn.verdict(running=True) == ("open", "so far 2 tokens compared, all the same")
    assert turn.verdict(running=False) == ("open", "stopped, 2 tokens compared, all the same")
    for answer in turn.answers.values():
        answer.state = "done"
    kind, words = turn.verdict(running=False)
    assert kind == "differ" and "from new token 3 on (in bfloat16 near ties" in words


@pytest.mark.parametrize("order, ways", app.ORDERS.items())
def test_one_column_is_done_before_the_other_begins(engine, order, ways, monkeypatch):
    monkeypatch.setattr(app, "INTERVAL", 0.0)
    (first, second), whole = ways, as_shown(plain_text(engine))
    assert set(ways) == set(app.WAYS)
    for _, page, _, _ in states(engine, order=order):
        shown = texts(page)
        assert not shown[second] or shown[first] == whole
    assert f"{app.WAYS[first]} <small>first, done" in page and f"{app.WAYS[second]} <small>second, done" in page


def test_both_columns_have_the_same_prepared_layers(engine):
    layers = [module for module in engine.target.modules() if isinstance(module, torch.nn.Linear)]
    assert layers and all("forward" in vars(layer) for layer in layers)


def test_any_text_is_shown_as_text():
    text = "<script>alert(1)</script> &amp; \x00\x07\x7f\x9b ${1 + 1} {{value}}\n\t\ud800"
    html = app.shown(text)
    assert "<" not in html and unescape(html) == (
        "<script>alert(1)</script> &amp; \u2400\u2407\u2421\ufffd ${1 + 1} {{value}}\n\t\ufffd"
    )
    turn = app.Turn("<b>bold</b>", ("plain", "drafted"), 0.0, "float32")
    turn.answers["drafted"].tokens = [app.StreamedToken(1, "<img src=x>", 0), app.StreamedToken(2, "<i>", None)]
    page = turn.html()
    assert "&lt;b&gt;" in page and "&lt;img" in page and "&lt;i&gt;" in page
    assert not re.search("<(b>bold|img|i>)", page)


# Chats


def test_the_chat_goes_on_with_what_was_answered(engine):
    _, first, turns, _ = states(engine)[-1]
    earlier, page, both, _ = states(engine, "And now?", turns, system="Be brief.")[-1]
    answer = plain_text(engine)
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n" + HELLO + answer
    prompt += "<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    assert texts(page)["drafted"] == texts(page)["plain"] == as_shown(plain_text(engine, prompt))
    assert texts(earlier) == texts(first) and len(both) == 2 and len(turns) == 1


def test_tools_that_the_template_ignores_are_written_as_text(engine):
    prompt = TOKENIZER.decode(app.prompt_ids(engine, [], "Hello", "Be brief.", TOOL))
    assert "get_tide" in prompt and prompt.index("Be brief.") < prompt.index("get_tide") < prompt.index("Hello")
    assert TOKENIZER.decode(app.prompt_ids(engine, [], "Hello", "", "")) == HELLO
    for example in app.EXAMPLES.values():
        assert len(app.prompt_ids(engine, [], *example)) > 10


# What is refused


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"message": ""}, "Write a message first"),
        ({"message": None}, "Write a message first"),
        ({"message": " \n"}, "Write a message first"),
        ({"message": "\u200b\u2060"}, "Write a message first"),
        ({"depth": None}, "K must be a number from 1 to"),
        ({"depth": 99}, "K must be a number from 1 to"),
        ({"nodes": [3]}, "The number of draft tokens must be"),
        ({"max_tokens": float("nan")}, "The number of new tokens must be a number from 1 to 512, not nan"),
        ({"temperature": "<b>"}, "The temperature must be a number from 0 to 2, not .*&lt;b&gt;"),
        ({"message": "Hel\x07lo"}, "The message has a control character, U\\+0007, at place 4: remove it"),
        ({"message": "\ud800"}, "control character, U\\+D800"),
        ({"system": "\x00"}, "The system prompt has a control character"),
        ({"message": "a" * 20_001}, "20001 characters: shorten it to 20000"),
        ({"message": "a" * 480}, r"The chat has \d+ tokens, and with 16 new ones exceeds the target's 512: shorten"),
        ({"tools": "get_tide()"}, "tools are not a list of schemas"),
        ({"tools": '"get_tide"'}, "tools are not a list of schemas"),
        ({"tools": "[" * 5000}, "nested too deeply|not a list of schemas"),
    ],
)
def test_bad_input_is_refused_with_the_cause_before_anything_runs(engine, change, fault):
    engine.drafter.calls.clear()
    with pytest.raises(app.Refused, match=fault):
        states(engine, **change)
    assert not engine.drafter.calls


def test_a_chat_may_fill_the_context_to_the_last_token(engine):
    free = 512 - len(TOKENIZER(HELLO)["input_ids"]) + 5
    page = states(engine, "a" * (free - 8), max_tokens=8)[-1][1]
    assert "✓ outputs identical: 8 of 8 tokens" in page
    with pytest.raises(app.Refused, match="exceeds the target's 512"):
        states(engine, "a" * (free - 7), max_tokens=8)


def test_an_error_in_decoding_is_told_and_what_was_there_stays(engine, monkeypatch):
    def failing(self, *arguments, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(engine.drafter), "draft", failing)
    pages = []
    with pytest.raises(gr.Error, match="Decoding failed: out of memory"):
        pages.extend(app.answer(engine, [], "Hello", **SETTINGS))
    _, page, turns, message = pages[-1]
    assert texts(page)["plain"] == as_shown(plain_text(engine)) and message == "Hello" and "second, stopped" in page
    monkeypatch.undo()
    assert "✓ outputs identical" in states(engine, turns=turns)[-1][1]


@pytest.mark.parametrize("arguments", [{"drafter": "nowhere"}, {"target": "/nowhere/at/all"}])
@pytest.mark.parametrize("way", ["argument", "environment"])
def test_a_missing_model_is_told_on_the_page(arguments, way, monkeypatch):
    ((name, value),) = arguments.items()
    if way == "environment":
        monkeypatch.setenv(name.upper(), value)
        arguments = {}
    config = str(app.build_demo(**arguments).get_config_file()["components"])
    assert "could not be loaded" in config and value in config and "--drafter" in config and "Send" not in config


# Many at once


def test_a_turn_that_is_left_stops_decoding_and_the_chat_goes_on_with_what_there_is(engine):
    threads = threading.active_count()
    pages = app.answer(engine, [], "Hello", **SETTINGS | {"max_tokens": 200, "order": "P-EAGLE first"})
    turns = next(pages)[2]
    while len(turns[-1].answers["drafted"].ids) < 5:
        next(pages)
    pages.close()
    assert threading.active_count() == threads and len(turns[-1].answers["drafted"].ids) < 100
    page = app.stop(turns)
    assert "first, stopped" in page and "second, stopped" in page and "identical" not in page
    chat = TOKENIZER.decode(app.prompt_ids(engine, turns, "Go on", "", ""))
    assert chat.startswith(HELLO + turns[-1].text + "<|im_end|>") and app.stop([]) == ""


def test_visitors_at_once_get_their_own_answers(engine):
    words, read, start = ["Hello", "Who?", "Tell me"], {}, threading.Barrier(3)

    def visit(word):
        start.wait()
        pages = app.answer(engine, [], word, **SETTINGS)
        if word == "Who?":  # this one leaves
            next(pages), next(pages), pages.close()
        else:
            read[word] = texts(list(pages)[-1][1])

    threads = [threading.Thread(target=visit, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read) == {"Hello", "Tell me"}
    for word, columns in read.items():
        expected = as_shown(plain_text(engine, HELLO.replace("Hello", word)))
        assert columns == dict.fromkeys(app.WAYS, expected)


# The served page


@pytest.fixture(scope="module")
def url():
    drafter, target, tokenizer = pair()
    demo = app.build_demo(drafter, target, tokenizer=tokenizer)
    _, url, _ = demo.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    yield url
    demo.close()


def visitor(url):
    return Client(url, verbose=False, httpx_kwargs={"timeout": 60})


def ask(client, message, **settings):
    return client.submit(message, **SETTINGS | {"max_tokens": 8} | settings, api_name="/answer")


def test_the_served_chat_keeps_each_sessions_turns(url, engine):
    client, other = visitor(url), visitor(url)
    mine, theirs, whole = ask(client, "Hello"), ask(other, "Who?"), as_shown(plain_text(engine, max_tokens=8))
    assert texts(mine.result()[1])["drafted"] == whole
    assert texts(theirs.result()[1])["drafted"] == as_shown(plain_text(engine, HELLO.replace("Hello", "Who?"), 8))
    earlier, page, _ = ask(client, "Hello").result()
    assert texts(earlier)["drafted"] == whole != texts(page)["drafted"]
    client.predict(api_name="/clear")
    earlier, page, _ = ask(client, "Hello").result()
    assert earlier == "" and texts(page)["drafted"] == whole


def test_what_is_out_of_bounds_is_refused_to_the_one_who_sent_it(url, capfd):
    client = visitor(url)
    with pytest.raises(Exception, match="Write a message first"):
        ask(client, " ").result()
    assert "Traceback" not in capfd.readouterr().err  # as it would be for a fault of the server's
    for change in ({"depth": 99}, {"max_tokens": 100_000}, {"temperature": -1}, {"order": "at once"}):
        with pytest.raises(Exception, match="[Vv]alue"):
            ask(client, "Hello", **change).result()
    assert "✓ outputs identical" in ask(visitor(url), "Hello").result()[1]


def test_one_who_leaves_frees_the_place_for_the_next(url):
    long = ask(visitor(url), "Hello", max_tokens=400)
    waiting = ask(visitor(url), "Hello")
    while not long.outputs():
        assert not long.done()
        threading.Event().wait(0.05)
    long.cancel()
    assert "✓ outputs identical: 8 of 8 tokens" in waiting.result(timeout=20)[1]


# ZeroGPU


def test_on_zerogpu_the_handler_is_the_one_that_asks_for_the_gpu(monkeypatch):
    asked = []
    spaces = types.ModuleType("spaces")
    spaces.GPU = lambda duration: lambda function: asked.append((duration, function.__name__)) or function
    monkeypatch.setitem(sys.modules, "spaces", spaces)
    drafter, target, tokenizer = pair()
    try:
        importlib.reload(app).build_demo(drafter, target, tokenizer=tokenizer)
    finally:
        monkeypatch.undo()
        importlib.reload(app)
    assert asked == [(app.GPU_SECONDS, "respond")]
