"""Windows over long chats: exact on hand-made chats, random chats and the real agent rows."""

import re
from collections import Counter

import numpy as np
import pytest
from chats import (
    CALL,
    CHATML,
    FAMILIES,
    PLAIN,
    TOOL,
    TOOLS,
    chat,
    chatml,
    make_tokenizer,
    samples_of,
    shared,
    supervised_runs,
    template_ids,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.chat_template import Sample
from data.conversations import BadConversation, read_jsonl
from data.windows import cut_windows, find_turns, split_sample


# The default system prompt of SmolLM2 and Qwen2.5: written where the chat has none.
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3: the last answer has an empty thought before it, and no other has.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.role == 'assistant' %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Mistral: the system prompt is in the last user turn.
LATE_SYSTEM = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{{ '[INST]' + (system + '\n\n' if loop.last or loop.nextitem is defined and loop.index >= loop.length - 1 else '') }}"
    "{{ m.content + '[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    **{name: (lambda build=build: build(), end) for name, (build, end) in FAMILIES.items()},
    "plain": (lambda: make_tokenizer(PLAIN, ["<eos>"], eos="<eos>"), "\n"),
    "default system": (lambda: chatml(DEFAULT_SYSTEM), "<|im_end|>"),
    "tools": (lambda: chatml(TOOLS), "<|im_end|>"),
}


def encode(row, tokenizer, end=None):
    (sample,) = samples_of(
        row, tokenizer, [tokenizer.convert_tokens_to_ids(end)] if end in tokenizer.get_vocab() else []
    )
    return sample


def stretches(length, anchor, starts, max_seq_len):
    """The first token and the end of each window's stretch, from the windows of numbered tokens."""
    windows = cut_windows(range(length), [0] * length, anchor, starts, max_seq_len)
    found = []
    for window in windows:
        ids = window["input_ids"].tolist()
        assert ids[:anchor] == list(range(anchor))
        assert ids[anchor:] == list(range(ids[anchor], ids[-1] + 1)), "a stretch has a gap"
        found.append((ids[anchor], ids[-1] + 1))
    return found


def check(encoded, windows, anchor, starts, max_seq_len):
    """All that is promised about the windows of a chat that is too long."""
    ids, mask = encoded.input_ids, np.array(encoded.loss_mask)
    spans = stretches(len(ids), anchor, starts, max_seq_len)
    assert len(windows) == len(spans) > 1
    room, laid, covered = max_seq_len - anchor, np.zeros_like(mask), np.zeros(len(ids), bool)
    covered[:anchor] = True
    laid[:anchor] = windows[0]["loss_mask"][:anchor]
    for number, (window, (start, stop)) in enumerate(zip(windows, spans, strict=True)):
        assert window["input_ids"].tolist() == ids[:anchor] + ids[start:stop], "not the anchor and a stretch"
        assert len(window["loss_mask"]) == len(window["input_ids"]) <= max_seq_len
        assert number == 0 or not window["loss_mask"][:anchor].any(), "the system prompt is supervised"
        laid[start:stop] += window["loss_mask"][anchor:]
        covered[start:stop] = True
    assert covered.all(), "a token is in no window"
    assert (laid == mask).all(), "a token is supervised twice, or never, or wrongly"
    assert sum(int(window["loss_mask"].sum()) for window in windows) == mask.sum()
    half = room - room // 2
    for (start, stop), (following, _) in zip(spans, spans[1:]):
        assert stop - start == room, "only the last stretch may be short"
        assert abs(following - start - half) <= room // 4
        assert following in starts or following - start == half, "neither a turn nor the middle"
        nearest = min((abs(place - start - half) for place in starts), default=room)
        assert abs(following - start - half) == (nearest if nearest <= room // 4 else 0)
    assert spans[-1][1] - spans[-1][0] > room // 4, "degenerate last window"


# ---- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", [None, "Answer in verse."])
def test_a_window_reads_as_the_template_renders_the_system_prompt_and_its_turns(name, system):
    build, end = TEMPLATES[name]
    tokenizer = build()
    messages = chat(*(f"{'Question' if i % 2 == 0 else 'Answer'} {i}" for i in range(12)), system=system)
    row = {"messages": messages, "tools": [TOOL] if name == "tools" else None}
    encoded = encode(row, tokenizer, end)
    anchor, starts = find_turns(encoded.chat)
    lead = messages[: len(messages) - 12]
    if name == "gemma" and system:  # the system prompt is inside the first user turn
        assert tokenizer.decode(encoded.input_ids[:anchor]) == f"<bos><start_of_turn>user\n{system}\n\n"
        assert len(starts) == 5
    else:
        shown = tokenizer.decode(encoded.input_ids[:anchor])
        assert (system or "") in shown and "Question" not in shown and not shown.rstrip().endswith(("user", "You:"))
        assert (name != "tools") or "get_tide" in shown
        assert len(starts) == 11
    compared = 0
    for max_seq_len in range(max(anchor * 2, 100), len(encoded.input_ids), 7):
        windows = split_sample(encoded, max_seq_len)
        check(encoded, windows, anchor, starts, max_seq_len)
        spans = stretches(len(encoded.input_ids), anchor, starts, max_seq_len)
        for window, (start, _) in zip(windows[1:], spans[1:]):
            turn = (starts.index(start) + 1) * (12 // (len(starts) + 1)) if start in starts else None
            if turn is not None and not (name == "gemma" and turn % 2):  # Gemma's template wants the user first
                rendered = template_ids(tokenizer, [*lead, *messages[len(lead) + turn :]], tools=row["tools"])
                ids = window["input_ids"].tolist()
                assert ids == rendered[: len(ids)]
                compared += 1
    assert compared > 5


def test_a_turn_that_fills_a_window_is_cut_into_halves():
    tokenizer = chatml()
    row = {"messages": chat("Hello", "x" * 1000, system="Be brief.")}
    encoded = encode(row, tokenizer)
    anchor, starts = find_turns(encoded.chat)
    assert tokenizer.decode(encoded.input_ids[:anchor]) == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert [tokenizer.decode(encoded.input_ids[place:])[:22] for place in starts] == ["<|im_start|>assistant\n"]
    windows = split_sample(encoded, 100)
    check(encoded, windows, anchor, starts, 100)
    spans, room = stretches(len(encoded.input_ids), anchor, starts, 100), 100 - anchor
    steps = np.diff([start for start, _ in spans])
    assert set(steps[1:]) == {room - room // 2} and len(spans) > 15
    # Each window supervises what the one before it did not hold: the second half, to its end.
    for window, (start, stop), (_, seen) in zip(windows[2:], spans[2:], spans[1:]):
        expected = [0] * (anchor + seen - start) + [1] * (stop - seen)
        assert window["loss_mask"].tolist()[: len(expected)][: anchor + 900] == expected or stop == len(
            encoded.input_ids
        )
    assert "".join(run for w in windows for run in supervised_runs(w, tokenizer)) == "x" * 1000 + "<|im_end|>"


def test_one_turn_of_100k_tokens():
    tokenizer = chatml()
    row = {"messages": chat("Hello", "ab " * 34_000)}
    encoded = encode(row, tokenizer)
    windows = split_sample(encoded, 4096)
    check(encoded, windows, *find_turns(encoded.chat), 4096)
    assert len(windows) == 49


def test_a_chat_that_fits_is_its_own_window():
    tokenizer = chatml()
    row = {"messages": chat("Hello", "Hi")}
    encoded = encode(row, tokenizer)
    (window,) = split_sample(encoded, len(encoded.input_ids))
    assert window["input_ids"].tolist() == encoded.input_ids and window["input_ids"].dtype == np.int32
    assert window["loss_mask"].tolist() == encoded.loss_mask and window["loss_mask"].dtype == np.int8
    assert len(split_sample(encoded, len(encoded.input_ids) - 1)) == 2


def test_the_targets_own_tokens_are_cut_too():
    tokenizer = chatml()
    answer = tokenizer("Hi " * 50, add_special_tokens=False)["input_ids"]
    messages = chat("One", "First answer.", "Two", "replaced", system="Be brief.")
    row = {"messages": messages, "resp_ids": answer}
    encoded = encode(row, tokenizer)
    anchor, starts = find_turns(encoded.chat)
    assert (
        len(starts) == 3
        and encoded.input_ids[starts[-1] :]
        == template_ids(tokenizer, messages[:-1], add_generation_prompt=True)[starts[-1] :] + answer
    )
    windows = split_sample(encoded, 80)
    check(encoded, windows, anchor, starts, 80)
    assert "".join(run for w in windows for run in supervised_runs(w, tokenizer)) == "Hi " * 50


def test_calls_and_results_are_turns():
    tokenizer = chatml(TOOLS)
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c", "content": "3 m"}
    row = {
        "messages": [*chat("Tide?", system="Pilot."), call, result, *chat("", "3 m.", "Thanks", "Bye")[1:]],
        "tools": [TOOL],
    }
    encoded = encode(row, tokenizer)
    anchor, starts = find_turns(encoded.chat)
    ids = encoded.input_ids
    text = tokenizer.decode(ids[anchor:])
    assert text.startswith("<|im_start|>user\nTide?")
    roles = [re.match(r"<\|im_start\|>(\w+)\n", tokenizer.decode(ids[place:]))[1] for place in starts]
    assert roles == ["assistant", "tool", "assistant", "user", "assistant"]


def test_templates_without_turn_starts_are_cut_anywhere():
    """One answer of a thinking template: its prefixes are not the chat's, but anchor and windows are."""
    tokenizer = chatml(THINKING)
    row = {"messages": chat("Hello", "x" * 200, system="Be brief.")}
    encoded = encode(row, tokenizer)
    anchor, starts = find_turns(encoded.chat)
    assert tokenizer.decode(encoded.input_ids[:anchor]) == "<|im_start|>system\nBe brief.<|im_end|>\n"
    check(encoded, split_sample(encoded, 90), anchor, starts, 90)


def test_what_cannot_be_cut_says_why():
    tokenizer = chatml()
    row = {"messages": chat("Hello", "x" * 200, system="s" * 60)}
    encoded = encode(row, tokenizer)
    anchor, _ = find_turns(encoded.chat)
    with pytest.raises(
        BadConversation, match=f"system prompt too long: {anchor} tokens, which leave no quarter of 92"
    ):
        split_sample(encoded, 92)
    assert split_sample(encoded, -(-anchor * 4 // 3))
    late = make_tokenizer(LATE_SYSTEM, ["[INST]", "[/INST]", "<eos>"], eos="<eos>")
    row = {"messages": chat("One", "x" * 100, "Two", "Bye", system="Be brief.")}
    with pytest.raises(BadConversation, match="system prompt is not at the start of the chat"):
        find_turns(samples_of(row, late)[1].chat)


ARBITRARY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOKENIZERS = {name: (build(), end) for name, (build, end) in TEMPLATES.items()}
texts = st.text(st.sampled_from("ab \n.é😀"), min_size=1, max_size=60).filter(str.strip)


@ARBITRARY
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    system=st.none() | texts,
    turns=st.lists(texts | texts.map(lambda text: text * 8), min_size=2, max_size=9),
    share=st.floats(0.02, 0.999),
)
def test_any_chat_in_any_window(name, system, turns, share):
    tokenizer, end = TOKENIZERS[name]
    row = {"messages": chat(*turns, system=system)}
    encoded = encode(row, tokenizer, end)
    max_seq_len = max(8, int(len(encoded.input_ids) * share))
    anchor, starts = find_turns(encoded.chat)
    assert starts == sorted(set(starts)) and all(anchor < place < len(encoded.input_ids) for place in starts)
    if max_seq_len - anchor < max_seq_len / 4:
        with pytest.raises(BadConversation, match="system prompt too long"):
            split_sample(encoded, max_seq_len)
    else:
        windows = split_sample(encoded, max_seq_len)
        check(encoded, windows, anchor, starts, max_seq_len)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_lengths(data):
    length = data.draw(st.integers(9, 400))
    max_seq_len = data.draw(st.integers(8, length - 1))
    anchor = data.draw(st.integers(0, max_seq_len * 3 // 4))
    starts = sorted(data.draw(st.sets(st.integers(anchor + 1, length - 1), max_size=30)))
    mask = np.random.default_rng(length).integers(0, 2, length)
    mask[:anchor] = 0
    encoded = Sample(list(range(length)), mask, chat=None)
    check(encoded, cut_windows(encoded.input_ids, mask, anchor, starts, max_seq_len), anchor, starts, max_seq_len)


@pytest.mark.parametrize("fault", ["lost window", "shifted mask", "supervised twice", "no anchor", "another token"])
def test_the_check_sees_faults(fault):
    """Negative controls of `check`."""
    tokenizer = chatml()
    row = {"messages": chat("Hello", "x" * 300, system="Be brief.")}
    encoded = encode(row, tokenizer)
    anchor, starts = find_turns(encoded.chat)
    windows = split_sample(encoded, 100)
    check(encoded, windows, anchor, starts, 100)
    if fault == "lost window":
        windows.pop()
    elif fault == "shifted mask":
        windows[0]["loss_mask"] = np.roll(windows[0]["loss_mask"], 1)
    elif fault == "supervised twice":
        windows[2]["loss_mask"][anchor] = 1
    elif fault == "no anchor":
        windows[1] = {name: column[anchor:] for name, column in windows[1].items()}
    else:
        windows[1]["input_ids"][anchor + 3] += 1
    with pytest.raises(AssertionError):
        check(encoded, windows, anchor, starts, 100)


def test_a_system_prompt_moved_into_the_first_user_turn_is_repeated():
    refusing = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
    )
    tokenizer = chatml(refusing)
    encoded = encode({"messages": chat("Hello", "x" * 200, "And?", "y" * 200, system="Be brief.")}, tokenizer)
    anchor, starts = find_turns(encoded.chat)
    assert tokenizer.decode(encoded.input_ids[:anchor]) == "<|im_start|>user\nBe brief.\n\n"
    check(encoded, split_sample(encoded, 120), anchor, starts, 120)


# ---- real rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_seq_len", "windows"), [(1024, 0), (2048, 183), (4096, 47)])
def test_real_agent_rows(max_seq_len, windows, smollm2):
    """20 chats behind a policy of 1343 tokens, which leaves no room in 1024."""
    template, smollm2.chat_template = smollm2.chat_template, TOOLS
    try:
        reasons, found, at_turns = Counter(), 0, 0
        for _, row in read_jsonl(shared("formats/airline_tool_calls.jsonl")):
            encoded = encode(row, smollm2, "<|im_end|>")
            try:
                cut = split_sample(encoded, max_seq_len)
            except BadConversation as bad:
                reasons[bad.reason] += 1
                continue
            found += len(cut)
            if len(cut) > 1:
                anchor, starts = find_turns(encoded.chat)
                policy = template_ids(smollm2, row["messages"][:1])
                assert encoded.input_ids[:anchor] == policy and len(starts) == len(row["messages"]) - 2
                check(encoded, cut, anchor, starts, max_seq_len)
                spans = stretches(len(encoded.input_ids), anchor, starts, max_seq_len)
                at_turns += sum(start in starts for start, _ in spans[1:])
        assert reasons == ({"system prompt too long": 20} if max_seq_len == 1024 else {})
        assert found == windows and (at_turns > 0.7 * (found - 20) or max_seq_len == 1024)
    finally:
        smollm2.chat_template = template
