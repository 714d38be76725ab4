"""Conversation files as users have them, row by row, in one form: OpenAI messages and tools.

Nothing is dropped silently: a row that cannot be used is a [`BadConversation`] with a reason to count it by.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datasets import load_dataset
from huggingface_hub import HfFileSystem
from huggingface_hub.errors import HTTPError
from pyarrow import ArrowInvalid
from pyarrow.parquet import ParquetFile


ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLES |= {"developer": "system", "human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
ROLES |= dict.fromkeys(("function", "ipython", "observation", "tool_response"), "tool")


# Levels of nesting that a row may have. Templates and writers of JSON recurse, and Python ends that at 1000 calls.
DEEPEST = 100
SUFFIXES = (".jsonl", ".json", ".parquet")


class BadConversation(ValueError):
    """A row that cannot be trained on. ``reason`` is short and stable, to count by; ``str()`` adds a short detail."""

    def __init__(self, reason: str, detail: str = ""):
        detail = detail if len(detail) <= 100 else f"{detail[:100]}..."
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def parse(value, fault: str = "invalid JSON"):
    """``value``, or what it says if it is a string of JSON.

    Raises BadConversation: with ``fault`` as its reason where it is no JSON, or where it is nested too deeply.
    """
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if depth(value) <= DEEPEST:
            return value
    except RecursionError:
        pass
    except ValueError as error:
        raise BadConversation(fault, str(error)) from error
    raise BadConversation("nested too deeply", f"a row may have {DEEPEST} levels")


def depth(value) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth, inside), default=0)


@contextmanager
def opened(path):
    """A file's bytes, local or ``hf://``. Raises OSError where it cannot be read, httpx's errors too, which are none."""
    try:
        with HfFileSystem().open(path) if str(path).startswith("hf://") else Path(path).open("rb") as file:
            yield file
    except HTTPError as error:
        raise ConnectionError(f"{path} could not be read: {error}") from error


def read_jsonl(path) -> Iterator[tuple[int, dict | BadConversation]]:
    """Yield (line number from 1, row), with a BadConversation as the row of a broken line.

    Takes BOMs and CRLF line ends, passes over blank lines. Raises OSError where the file cannot be read.
    """
    # Bytes, because text mode would stop at the first invalid UTF-8.
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf")  # on any line, as joined files have it in the middle
            if not line.strip():
                continue
            try:
                row = parse(line.decode())
            except UnicodeDecodeError as error:
                row = BadConversation("invalid UTF-8", str(error))
            except BadConversation as bad:
                row = bad
            if not isinstance(row, dict | BadConversation):
                row = BadConversation("row is not an object", type(row).__name__)
            yield number, row


def without_nulls(value):
    """``value`` without the keys whose value is null: Arrow gives every row the keys that any row has."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def as_text(value) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def from_arrow(row: dict) -> dict:
    """A row of Arrow as JSON Lines would have it: without the keys of other rows, and with dates and such as text."""
    return json.loads(json.dumps(without_nulls(row), default=as_text))


def read_parquet(path) -> Iterator[dict]:
    """Yield the rows of a Parquet file. Raises ValueError where it is none."""
    try:
        file = ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error
    with file:
        for batch in file.iter_batches(batch_size=1024):
            yield from map(from_arrow, batch.to_pylist())


def files_of(folder: Path) -> list[Path]:
    """The files of a folder that `read_rows` reads, in order: all but hidden ones and manifests of our steps.

    Raises ValueError where there is none, or what `save_to_disk` wrote.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    if any(file.suffix == ".arrow" for file in files):
        raise ValueError(
            f"{folder} holds Arrow files, as of save_to_disk: save the data set with to_parquet or to_json instead"
        )
    files = [file for file in files if file.suffix in SUFFIXES and file.name != "manifest.json"]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    if not files:
        raise ValueError(f"{folder} holds no {', '.join(SUFFIXES)} file: name the folder of the conversations")
    return files


def read_rows(source: str | Path) -> Iterator[tuple[int, dict | BadConversation]]:
    """Yield (number from 1, row) of a file, of a folder, or of the train split of a data set.

    ``source``: a JSON Lines file (see `read_jsonl`), local or ``hf://``; a Parquet file; a folder, whose files are all
    read (see `files_of`), under numbers that go on from file to file; or the id of a data set on the Hub, which is
    streamed. Raises OSError or ValueError where it cannot be read.
    """
    path, name = Path(source), str(source)
    if path.is_dir():
        rows = (row for file in files_of(path) for _, row in read_rows(file))
        yield from enumerate(rows, start=1)
    elif path.is_file() and path.suffix == ".parquet":
        yield from enumerate(read_parquet(path), start=1)
    elif path.is_file() or name.startswith("hf://") and path.suffix in SUFFIXES[:2]:
        yield from read_jsonl(source)
    elif name.count("/") != 1 or path.suffix in SUFFIXES:
        raise FileNotFoundError(
            f"there is no file or folder {source}, and the id of a data set on the Hub would read owner/name"
        )
    else:
        yield from enumerate(map(from_arrow, load_dataset(name, split="train", streaming=True)), start=1)


def read_call(call) -> dict:
    """A tool call as ``{"type": "function", "function": {"name": str, "arguments": dict}}``, plus its id if it has one."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadConversation("tool call without a name")
    arguments = function.get("arguments", function.get("parameters", {}))
    fault = "tool call arguments are not JSON"
    while isinstance(arguments, str):  # some logs encode it twice
        arguments = parse(arguments or "{}", fault)
    if not isinstance(arguments, dict):
        raise BadConversation(fault, f"an object is needed, not {arguments!r}")
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {"type": "function", **identity, "function": {"name": function["name"], "arguments": arguments}}


def is_parts(content) -> bool:
    """Whether ``content`` is a list of OpenAI's content parts, or of plain texts."""
    return isinstance(content, list) and all(
        isinstance(part, str) or isinstance(part, dict) and "type" in part for part in content
    )


def read_message(message, index: int, answered: bool) -> dict:
    """One message without null keys, its role one of four, its content a string, its tool calls as of `read_call`.

    ``answered``: the answer is given otherwise, so that it may be empty here.
    """
    if not isinstance(message, dict):
        raise BadConversation("message is not an object", type(message).__name__)
    # A template that tests for a key would print the null, or an empty list of calls.
    message = {key: value for key, value in message.items() if value is not None and value != []}
    for name, other in (("role", "from"), ("content", "value")):  # ShareGPT
        if name not in message and other in message:
            message[name] = message.pop(other)
    role, calls, given = message.get("role"), message.get("tool_calls", []), "content" in message
    content = message.get("content", "")
    if role == "function_call":  # ShareGPT with tools: the content is the call
        role, calls, content = "assistant", [parse(content, "tool call without a name")], ""
    if not isinstance(role, str) or role not in ROLES:
        raise BadConversation("unknown role", repr(role))
    if ROLES[role] == "tool" and not isinstance(content, str) and not is_parts(content):
        content = json.dumps(content, ensure_ascii=False)  # a result that was logged as an object
    if isinstance(content, list):
        content = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(content) if all(isinstance(text, str) for text in content) else None
    if not isinstance(content, str):
        raise BadConversation("content is not text", f"{role} message {index}")
    if "function_call" in message:  # OpenAI's older form
        calls = [message.pop("function_call")]
    if not isinstance(calls, list):
        raise BadConversation("tool calls are not a list", repr(calls))
    message |= {"role": ROLES[role], "content": content}
    if calls:
        message["tool_calls"] = [read_call(call) for call in calls]
    # An empty system, user or tool text says something; an empty answer does not.
    absent = not content if message["role"] == "assistant" else not given
    if absent and not calls and not answered:
        raise BadConversation("message without content", f"{role} message {index}")
    return message


def read_tools(tools) -> list[dict] | None:
    """Schemas without null keys, functions as ``{"type": "function", "function": {"name": ...}}``; None for none."""
    fault = "tools are not a list of schemas"
    tools = without_nulls(parse(tools, fault)) or None
    if tools is None:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadConversation(fault, repr(tools))
    # A definition may stand by itself, as in OpenAI's older ``functions``.
    return [
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in tools
    ]


def read_conversation(row) -> tuple[list[dict], list[dict] | None]:
    """The messages and tools of a row in OpenAI's format, whatever format it has; the row is left as it is.

    Takes ``messages`` or ShareGPT's ``conversations``; the roles of ROLES; contents that are strings, null or text parts;
    tool calls with their arguments as an object or as JSON, once or twice encoded, or as ``function_call``; ``tools``
    or ``functions`` as a list or as JSON. Raises BadConversation.
    """
    messages = (row.get("messages") or row.get("conversations")) if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise BadConversation("no messages")
    answered = row.get("resp_ids") is not None
    last = len(messages) - 1
    messages = [read_message(message, i, answered and i == last) for i, message in enumerate(messages)]
    if all(message["role"] != "assistant" for message in messages):
        raise BadConversation("no assistant turn")
    return messages, read_tools(row.get("tools") or row.get("functions") or None)


def is_eval(messages: list[dict], eval_fraction: float) -> bool:
    """Side by a hash of what is said up to the first user turn: other answers and longer versions share its side."""
    asked = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    # White space around it and other keys, as ids and times, do not make it another text.
    opening = [{"content": m["content"].strip(), "role": m["role"]} for m in messages[: asked + 1]]
    digest = hashlib.sha256(json.dumps(opening).encode()).digest()
    return int.from_bytes(digest[:8], "big") < eval_fraction * 2**64
