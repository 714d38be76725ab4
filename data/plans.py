"""What `data.generate_data` asks for: prompt rows or topics to plans, conversations whose answers are still open."""

import json
from collections.abc import Iterator
from itertools import islice

from data.chat_template import render
from data.conversations import ROLES, BadConversation, read_conversation, read_message, read_rows
from data.hub import public_name
from data.windows import ANSWER


def _tool(name: str, does: str, **parameters: str) -> dict:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": does, "parameters": schema}}


TOOLS = [
    _tool("get_weather", "The weather forecast for a city.", city="name of the city", day="date, as 2025-03-01"),
    _tool("search_web", "Search the web.", query="what to search for"),
    _tool("convert_currency", "Convert money.", amount="how much", source="its currency", target="the other currency"),
]
# Topic, system prompt and first words of the user: the target writes on from there. Seven topics, so that their turns
# do not fall in step with the temperatures'.
TOPICS = (
    ("chat", "You are a friendly assistant.", ("", "What should I", "Can you recommend", "I would like to", "Why do")),
    (
        "code",
        "You are an expert programmer.",
        ("", "Write a Python function", "How do I", "Fix this code", "Write SQL"),
    ),
    ("maths", "You are a patient maths teacher.", ("", "Solve", "What is", "If I have", "Explain", "Calculate")),
    (
        "translation",
        "You are a translator.",
        ("", "Translate into French:", "How do you say", "Translate to English:"),
    ),
    (
        "summary",
        "You summarise texts.",
        ("", "Summarize this text:", "Give me the main points of", "In one sentence,"),
    ),
    (
        "writing",
        "You are a creative writer.",
        ("", "Write a short story about", "Write an email", "Write a poem about"),
    ),
    ("tools", "You may call tools.", ("", "What is the weather", "How much is", "Search for", "Find out")),
)


def plan_row(row: dict, max_turns: int | None) -> dict:
    """The ``messages`` of a prompt row, with an empty assistant message wherever the target is to answer, and its
    ``tools``. Raises BadConversation."""
    match row:
        case {"messages": [_, *_] as messages} | {"conversations": [_, *_] as messages}:
            pass
        case {"turns": [_, *_] as turns}:
            messages = [m for turn in turns for m in ({"role": "user", "content": turn}, {"role": "assistant"})]
        case {"prompt": str(text)} if text:
            messages = [{"role": "user", "content": text}]
        case _:
            raise BadConversation("no messages, prompt or turns")
    answer, planned, places = {"role": "assistant"}, [], []
    for index, message in enumerate([*messages, answer]):
        role = message.get("role", message.get("from")) if isinstance(message, dict) else None
        if isinstance(role, str) and ROLES.get(role) == "assistant" or role == "function_call":
            if planned and planned[-1] is answer:  # of answers with nothing in between, the target writes one
                continue
            places.append(len(planned))
            planned.append(answer)
        else:
            planned.append(read_message(message, index, False))
    if not places[0]:
        raise BadConversation("starts with an assistant turn")  # there is nothing that it could answer
    planned = planned[: places[:max_turns][-1] + 1]
    probe = [message | {"content": ANSWER} if message is answer else message for message in planned]
    _, tools = read_conversation({"messages": probe, "tools": row.get("tools") or row.get("functions")})
    kept = json.dumps([planned, tools], ensure_ascii=False)
    try:
        kept.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON may spell but no file and no tokenizer takes
        raise BadConversation("text is not valid Unicode") from None
    planned, tools = json.loads(kept)
    return {"messages": planned, "tools": tools}


def plan_prompts(prompts, max_turns, limit) -> Iterator[tuple[str, dict | BadConversation | RecursionError]]:
    """Name and plan of each of the first ``limit`` rows. The name is the row's own ``id`` if it has one, with the line
    behind it where an earlier row, a broken one too, has that name already."""
    names = set()
    for number, row in islice(read_rows(prompts), limit):
        name, plan = f"line-{number}", row
        if isinstance(row, dict):
            own = row.get("id", row.get("question_id"))
            if isinstance(own, str | int | float):
                name = str(own).encode(errors="replace").decode()  # half a surrogate pair could not be written
            try:
                plan = plan_row(row, max_turns) | {"source": public_name(prompts)}
            except (BadConversation, RecursionError) as bad:
                plan = bad
        while name in names:
            name += f"-line-{number}"
        names.add(name)
        yield name, plan


def plan_self_prompted(tokenizer, max_turns: int | None, count: int) -> Iterator[tuple[str, dict]]:
    """``count`` plans over all topics. A user message without content is for the target to write, after ``words``."""
    user = [{"role": "user", "content": ANSWER}]
    try:
        with_system = "peagle-system" in render(
            tokenizer, [{"role": "system", "content": "peagle-system"}, *user], None
        )
    except BadConversation:
        with_system = False
    tools = TOOLS if render(tokenizer, user, TOOLS) != render(tokenizer, user, None) else None
    for index in range(count):
        topic, system, openings = TOPICS[index % len(TOPICS)]
        words = openings[index // len(TOPICS) % len(openings)]
        turns = [{"role": "user", "words": words}, {"role": "assistant"}]
        turns += [{"role": "user", "words": ""}, {"role": "assistant"}] * ((max_turns or 1) - 1)
        lead = [{"role": "system", "content": system}] if with_system else []
        used = tools if topic == "tools" else None
        yield f"self-{index:06}", {"messages": lead + turns, "tools": used, "source": f"self: {topic}"}


def special_ids(tokenizer) -> set[int]:
    """All that decoding without special tokens drops; ``all_special_ids`` has only those with a role, as the EOS."""
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(tokenizer.all_special_ids)


def user_ends(tokenizer) -> tuple[int, ...]:
    """The id that the template writes right after a user's words, if it is a special token; Mistral's is no EOS."""
    after = render(tokenizer, [{"role": "user", "content": ANSWER}], None).rpartition(ANSWER)[2]
    first = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
    return tuple(first) if set(first) & special_ids(tokenizer) else ()
