"""One conversation as a generator of requests, and many of them at a time: what `data.generate_data` runs."""

import hashlib
import json
import re
import zlib
from collections import Counter, deque
from collections.abc import Generator, Iterator
from itertools import takewhile

from data.backends import Reply, Request, RequestFailed
from data.conversations import BadConversation
from data.plans import special_ids
from data.windows import up_to_words


USER_TOKENS, USER_TRIES = 200, 5
AHEAD = 16  # times the rows under way: so many may wait, finished, for a slower one before them to be written


def seed_of(*parts) -> int:
    """31 bits above 0, the same in every process."""
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (2**31 - 1) + 1


def fault_of_words(words: str, reply: Reply, special: set[int]) -> str | None:
    """Why a user turn that the target wrote is of no use; None if it is good."""
    if not reply.message["content"].strip():
        return "empty"
    if sum(map(str.isalnum, words)) < 8:
        return "too short"
    if reply.finish == "length":
        return "no end"
    if "\ufffd" in words or special & set((reply.ids or [])[:-1]):
        return "special or broken tokens"
    packed = len(zlib.compress(words.encode())) / len(words.encode())
    return "repeats itself" if len(words) > 80 and packed < 0.35 or re.search(r"(.)\1{19}", words) else None


def _draw_words(messages, plan, tokenizer, words, ends, notes) -> Generator[Request, Reply, str]:
    """A user turn after ``messages`` that starts with ``words``. Raises BadConversation after USER_TRIES bad ones."""
    text = up_to_words(tokenizer, messages, plan["tools"]) + words
    options = {"max_new_tokens": USER_TOKENS, "temperature": 1.0, "text": text, "ends": ends}
    for attempt in range(USER_TRIES):
        reply = yield Request(seed=seed_of(plan["seed"], len(messages), attempt), **options)
        drawn = (words + reply.message["content"]).strip()
        fault = fault_of_words(drawn, reply, special_ids(tokenizer))
        if fault is None:
            return drawn
        notes[f"user turn drawn again: {fault}"] += 1
    raise BadConversation("no usable user turn", f"the last of {USER_TRIES}: {fault}")


def calls_of(answer: dict) -> list[dict]:
    """What names each call of an answer in its result. Nothing, where a call is text, as the target in this process
    writes it: between the tags that Hermes and Qwen models were trained on."""
    if "tool_calls" in answer:
        return [{"tool_call_id": call["id"]} for call in answer["tool_calls"]]
    return [{}] * answer["content"].count("<tool_call>")


def converse(plan: dict, tokenizer, ends: tuple[int, ...], max_new_tokens: int, notes: Counter):
    """A generator that yields a Request, is sent the Reply, and so on, and returns the row.

    ``plan``: as from `plan_row`, with ``id``, ``source``, ``temperature`` and ``seed``. ``notes`` counts what else
    there is to report. Raises BadConversation where there is no first answer, and what is thrown into it.
    """
    messages, tools, answers, calls, cut = [], plan["tools"], [], [], {}
    special = special_ids(tokenizer) if tokenizer else set()
    try:
        for index, message in enumerate(plan["messages"]):
            if "words" in message:
                words = yield from _draw_words(messages, plan, tokenizer, message["words"], ends, notes)
                messages.append({"role": "user", "content": words})
            elif message["role"] != "assistant":
                if message["role"] == "tool" and calls:  # the log's result, under the new call's name if it has one
                    kept = {key: value for key, value in message.items() if key != "tool_call_id"}
                    message = kept | calls.pop(0)
                messages.append(message)
            else:
                seed, given = seed_of(plan["seed"], len(messages)), list(messages)
                reply = yield Request(max_new_tokens, plan["temperature"], seed, messages=given, tools=tools)
                if not reply.message["content"] and "tool_calls" not in reply.message:
                    raise BadConversation("empty answer")
                fault = "answer hit the length limit (--max_new_tokens)" if reply.finish == "length" else None
                if special & set((reply.ids or [])[:-1]):
                    fault = "special tokens in an answer"
                if not fault or reply.ids and not answers:  # its tokens tell what its text does not
                    answers.append(reply)
                    messages.append(reply.message)
                if fault:
                    raise BadConversation(fault)
                calls, following = calls_of(reply.message), plan["messages"][index + 1 :]
                results = list(takewhile(lambda message: message["role"] == "tool", following))
                if following and len(calls) != len(results):
                    raise BadConversation("tool calls and results do not match")
    except BadConversation as bad:
        if not answers:
            raise
        planned = sum(message["role"] == "assistant" for message in plan["messages"])
        cut = {"cut": bad.reason, "turns_left_out": planned - len(answers)}
    while messages[-1]["role"] != "assistant":
        messages.pop()
    row = {"id": plan["id"], "messages": messages} | ({"tools": tools} if tools else {})
    row |= {key: plan[key] for key in ("source", "temperature", "seed")} | {"finish": answers[-1].finish} | cut
    return row | ({"resp_ids": answers[0].ids} if len(answers) == 1 and answers[0].ids else {})


def run_all(plans, backend, start) -> Iterator[tuple[str, dict | Exception, Counter]]:
    """Hold as many conversations as the back end has slots. Yields name, row or error, and notes, in order of ``plans``.

    ``plans``: names with a plan or an error. ``start``: makes the generator of one, from its plan and its notes.
    """
    plans, more, running, finished, order, notes = iter(plans), True, {}, {}, deque(), {}

    def advance(name, value):
        while True:
            try:
                talk = running[name]
                request = talk.throw(value) if isinstance(value, Exception) else talk.send(value)
                return backend.submit(name, request)
            except StopIteration as stop:
                finished[name] = stop.value
                return running.pop(name)
            except (BadConversation, RequestFailed, RecursionError) as error:
                if talk.gi_frame is None:  # it came out of the conversation, so that has ended
                    finished[name] = error
                    return running.pop(name)
                value = error  # it came from the back end, and the conversation may know what to do

    while True:
        while more and len(running) < backend.slots and len(order) < AHEAD * backend.slots:
            name, plan = next(plans, (None, None))
            if not (more := name is not None):
                break
            order.append(name)
            notes[name] = Counter()
            if isinstance(plan, Exception):
                finished[name] = plan
            else:
                running[name] = start(plan, notes[name])
                advance(name, None)
        while order and order[0] in finished:
            name = order.popleft()
            yield name, finished.pop(name), notes.pop(name)
        if running:
            advance(*backend.receive())
        elif not more:
            return
