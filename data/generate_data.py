"""Conversations in the target's own words: `python -m data.generate_data --output chats.jsonl`.

A drafter has to learn what the target says, so every assistant turn is written by the target: of the conversations in
``--prompts``, or of conversations whose user turns it writes as well (self-prompting: it goes on with its chat template
from where a user's words begin). A prompt row has `messages` (with `tools` if need be; all assistant turns are replaced,
one after the other, each seeing the new ones before it), a `prompt`, or `turns`, a list of user turns.

A row of the output has `id`, `messages`, `tools` if there are any, `source`, `temperature`, `seed`, `finish` ("stop", or
"length" where the answer hit the token limit) and, with a single answer whose tokens are known, `resp_ids`: these, the end
of the turn included where the target wrote one. A conversation ends before a later answer that hits the limit, is empty
or has special tokens inside, as its text would not tell what the target wrote, and behind an answer whose calls are not
as many as the log has results for. Such a row has `cut`, the reason, and `turns_left_out`, the number of answers that
are missing for it.

Rows are written in the order of the input, each when it is done. A run that was killed is taken up by the same command.
In process the same seed and input give the same rows, whatever the batch size and however often the run was killed (up
to near ties, which rounding may decide otherwise in another batch). A server has its own ways with seeds.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Collection
from contextlib import closing
from itertools import takewhile
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from data.backends import InProcess, RequestFailed, Server, check_counts
from data.chat_template import encode_conversation
from data.conversations import BadConversation, read_jsonl
from data.converse import USER_TOKENS, converse, run_all, seed_of
from data.hub import add_hub_arguments, public_name, publish
from data.plans import plan_prompts, plan_self_prompted, user_ends
from target_peagle import load_target, load_tokenizer


SELF_PROMPTED = 100  # conversations, where no number is asked for


def _digest(messages: list[dict], tools) -> bytes:
    return hashlib.blake2b(json.dumps([messages, tools], sort_keys=True).encode(), digest_size=16).digest()


def _cuts(row: dict) -> Counter:
    """What there is to report of a row that is done, whichever run made it."""
    if "cut" not in row:
        return Counter()
    return +Counter({f"of the done cut: {row['cut']}": 1, "turns left out by cuts": row["turns_left_out"]})


def _opening(row: dict) -> bytes:
    """Of all before the first answer: what the target wrote of a self-prompted conversation before it is answered."""
    opening = list(takewhile(lambda message: message["role"] != "assistant", row["messages"]))
    return _digest(opening, row.get("tools"))


def _content_hash(path: Path) -> str:
    """SHA-256 of a file, or of the files of a folder one after the other."""
    total = hashlib.sha256()
    for part in [path] if path.is_file() else sorted(part for part in path.rglob("*") if part.is_file()):
        with part.open("rb") as file:
            hashlib.file_digest(file, lambda: total)
    return total.hexdigest()


def _cut_last_line(file) -> int:
    """Remove a last line that was cut short. Returns what is left, in bytes."""
    size = file.seek(0, os.SEEK_END)
    while size and (file.seek(size - 1), file.read(1))[1] != b"\n":
        size -= 1
    file.truncate(size)
    return file.seek(size)


class _Output:
    """The file of rows, the manifest beside it and, until the end, a file of what was finished before its turn to be
    written. Opening repairs what a kill left behind.

    ``rows``: the `_cuts` of those that are there, by name; ``openings``: theirs; ``ahead``: row and notes of those that wait
    for their turn. Raises ValueError where they were made with other settings.
    """

    def __init__(self, path: Path, settings: dict):
        self.path, self.settings, self.rows, self.openings = path, settings, {}, set()
        self.manifest = path.with_name(path.name + ".manifest.json")
        self.waiting, self.ahead, self.complete = path.with_name(path.name + ".ahead"), {}, False
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(f"{path}.lock", timeout=0)
        try:
            self.lock.acquire()
        except Timeout:
            raise ValueError(f"another run is writing {path}: wait for it, or name another output") from None
        try:
            self._open()
        except BaseException:
            self.lock.release()
            raise

    def _open(self) -> None:
        path, settings = self.path, self.settings
        if path.exists() and path.stat().st_size and not self.manifest.exists():
            raise ValueError(f"{path} is there, but not {self.manifest.name}: name another output")
        self.file, self.waiting_file = path.open("ab+"), self.waiting.open("ab+")
        begun = _cut_last_line(self.file) + _cut_last_line(self.waiting_file) > 0
        before = json.loads(self.manifest.read_text())["settings"] if begun else settings
        for key in settings | before:
            if before.get(key) != settings.get(key):
                told = f"{key} {before.get(key)!r}, not {settings.get(key)!r}"
                raise ValueError(f"{path} was made with {told}: repeat its own command or name another output")
        if not begun:  # settings bind the rows that are there
            self.write_manifest({})
        self._read()

    def _read(self) -> None:
        for number, row in read_jsonl(self.path):
            if isinstance(row, BadConversation) or not {"id", "messages"} <= row.keys():
                raise ValueError(f"{self.path}, line {number} is no row of this command: name another output")
            self.rows[row["id"]] = _cuts(row)
            self.openings.add(_opening(row))
        for _, waiting in read_jsonl(self.waiting):
            if waiting["row"]["id"] not in self.rows:
                self.ahead[waiting["row"]["id"]] = waiting["row"], Counter(waiting["notes"])

    def close(self) -> None:
        self.file.close()
        self.waiting_file.close()
        if self.complete and not self.ahead:  # else a later call, with more time or rows, has use for it
            self.waiting.unlink()
        self.lock.release()

    def write(self, row: dict) -> None:
        self.file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self.file.flush()

    def keep(self, row: dict, notes: Counter) -> None:
        """Until its turn comes: slower conversations before it may take many minutes, in which a kill would lose it."""
        self.waiting_file.write(json.dumps({"row": row, "notes": notes}, ensure_ascii=False).encode() + b"\n")
        self.waiting_file.flush()

    def write_manifest(self, rest: dict) -> dict:
        manifest, partial = {"settings": self.settings} | rest, self.manifest.with_suffix(".partial")
        partial.write_text(json.dumps(manifest, indent=2) + "\n")
        os.replace(partial, self.manifest)  # the old one or the new one, whenever it is killed
        return manifest


class _Report:
    """Counts with the first case of each reason, and the progress shown. ``there``: rows that an earlier run wrote."""

    def __init__(self, rows: int | None, there: int, cost: str, slots: int, progress: bool):
        self.counts, self.first, self.slots = Counter({"in": 0, "done": 0}), {}, slots
        if progress:
            print(f"{'all' if rows is None else rows} conversations, {cost}; the time is told after the first batch")
        self.bar = tqdm(total=rows, initial=there, desc="conversations", unit=" rows", disable=not progress)
        self.start, self.fresh = time.monotonic(), 0

    def add(self, name: str, outcome: str, detail="", notes=()) -> None:
        self.counts.update(["in", outcome])
        self.counts.update(notes)
        if detail:
            self.first.setdefault(outcome, f" (first in {name}: {detail})")
        self.bar.update()
        self.fresh += outcome == "done"  # what was there, and a bad line, took no time
        left = (self.bar.total or 0) - self.bar.n
        if outcome == "done" and self.fresh == self.slots and left > 0 and not self.bar.disable:
            pace = (time.monotonic() - self.start) / self.fresh
            tqdm.write(f"about {pace * left / 60:.0f} minutes for the other {left}, {pace:.1f} s each")

    def __str__(self) -> str:
        return "; ".join(f"{count} {name}{self.first.get(name, '')}" for name, count in self.counts.items())


def generate_data(
    output,
    backend: InProcess | Server,
    tokenizer,
    *,
    prompts: str | None = None,
    num_conversations: int | None = None,
    temperatures: Collection[float] = (0.0, 0.7, 1.0),
    seed: int = 0,
    max_new_tokens: int = 512,
    max_turns: int | None = None,
    max_minutes: float | None = None,
    progress: bool = True,
) -> dict:
    """Write conversations to the JSON Lines file ``output``, or go on with it; see the module's docstring.

    Args:
        backend: who answers; it is entered and left here.
        tokenizer: the target's; only a server with ``prompts`` may do without (None), and then rows are not checked.
        prompts: as for `data.conversations.read_rows`; None is self-prompting.
        num_conversations: rows of the input to use; all if unset, or SELF_PROMPTED. More may be asked for later.
        temperatures: taken in turn by the rows. ``seed``: of all sampling.
        max_new_tokens: of an answer. ``max_turns``: answers of a conversation; if unset all of a row, or one.
        max_minutes: no conversation is begun after so many; those under way are finished, and the others counted as
            "not asked" (not those of a data set, which would have to be read to its end for that). The same call asks
            them later.
        progress: show the cost, a bar and the counts.

    Returns the manifest, which lies beside the output: "settings", and "counts" with "in" = "done" + all
    "skipped: <reason>" + all "failed: <reason>" + "not asked: out of time", and other things worth knowing. What failed is
    asked again when the command is repeated; what is there already counts as done.
    Raises ValueError: an argument is out of range, the output was made with other settings, or no conversation came of
    it. OSError: unreadable files.
    """
    check_counts(num_conversations=num_conversations, max_new_tokens=max_new_tokens, max_turns=max_turns)
    if max_minutes is not None and not max_minutes > 0:
        raise ValueError(f"max_minutes is {max_minutes}: it has to be above 0")
    deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
    if not temperatures or not all(0 <= temperature < math.inf for temperature in temperatures):
        raise ValueError(f"temperatures are {list(temperatures)}: at least one is needed, and each of 0 or more")
    output, counted = Path(output), prompts is None or Path(prompts).is_file()
    if prompts is None and tokenizer is None:
        raise ValueError("self-prompting needs the target's tokenizer: name the target")
    settings = {"prompts": None if prompts is None else public_name(prompts), "seed": seed}
    settings |= {"temperatures": [float(t) for t in temperatures]}
    settings |= {"max_new_tokens": max_new_tokens, "max_turns": max_turns} | backend.settings
    if prompts is not None and Path(prompts).exists():
        settings["prompts_sha256"] = _content_hash(Path(prompts))
    ends = user_ends(tokenizer) if prompts is None else ()

    def plans():
        if prompts is None:
            source = plan_self_prompted(tokenizer, max_turns, num_conversations or SELF_PROMPTED)
        else:
            source = plan_prompts(prompts, max_turns, num_conversations)
        for index, (name, plan) in enumerate(source):
            if isinstance(plan, dict):
                plan |= {"id": name, "temperature": settings["temperatures"][index % len(temperatures)]}
                plan["seed"] = seed_of(seed, name)
            yield name, plan

    next(plans(), None)  # input that cannot be read is told before anything is written
    store = _Output(output, settings)

    def todo():
        asked = set()
        for name, plan in plans():
            if prompts is not None and isinstance(plan, dict):  # a plan has all that is given, later turns too
                given = _digest(plan["messages"], plan["tools"])
                plan = BadConversation("duplicate prompt") if given in asked else plan
                asked.add(given)
            if name in store.rows:
                report.counts.update(["in", "done"])
                report.counts.update(store.rows[name])
                continue
            if isinstance(plan, dict) and time.monotonic() > deadline and name not in store.ahead:
                if not counted:
                    return
                report.counts.update(["in", "not asked: out of time"])
                continue
            yield name, plan

    def start(plan, notes):
        if plan["id"] in store.ahead:
            row, before = store.ahead.pop(plan["id"])
            notes.update(before)
        else:
            row = yield from converse(plan, tokenizer, ends, max_new_tokens, notes)
            store.keep(row, notes)
        return row

    rows, cost = num_conversations, f"at most {max_new_tokens:,} tokens an answer"
    if counted:  # to go twice through a data set would be to fetch it twice
        rows, words, answers = 0, 0, 0
        for name, plan in plans():
            rows += 1
            for message in plan["messages"] if isinstance(plan, dict) and name not in store.rows else ():
                words += "words" in message
                answers += message["role"] == "assistant"
        tokens = words * USER_TOKENS + answers * max_new_tokens
        cost = f"at most {words} user turns and {answers} answers to write, {tokens:,} tokens"
    report = _Report(rows, len(store.rows), cost, backend.slots, progress)
    with backend, closing(store), report.bar:
        for name, row, notes in run_all(todo(), backend, start):
            try:
                if isinstance(row, Exception):
                    raise row
                if prompts is None and _opening(row) in store.openings:
                    raise BadConversation("duplicate opening")  # known only now, as the target wrote it
                if tokenizer is not None:
                    encode_conversation(row, tokenizer, backend.stop_ids)
            except BadConversation as bad:
                report.add(name, f"skipped: {bad.reason}", bad, notes)
            except RecursionError as error:  # of JSON in its tools or calls, wherever that is read or written
                report.add(name, "skipped: nested too deeply", error, notes)
            except RequestFailed as error:
                report.add(name, f"failed: {error.reason}", error, notes)
            else:
                store.openings.add(_opening(row))
                store.write(row)
                report.add(name, "done", notes=notes + _cuts(row))
        store.complete = True
    counts = report.counts
    lost = sum(count for name, count in counts.items() if name.startswith(("skipped", "failed", "not asked")))
    assert counts["in"] == counts["done"] + lost, counts
    if progress:
        print(f"{output}: {report}")
    if not counts["done"]:
        raise ValueError(f"{output}: no conversation: {report}")
    return store.write_manifest({"counts": dict(counts)})


def _backend(args) -> tuple[InProcess | Server, object]:
    """The back end that the arguments ask for, and the tokenizer if one is known."""
    if args.base_url is None:
        target, tokenizer = load_target(args.target_model, dtype=args.dtype)
        return InProcess(target, tokenizer, batch_size=args.batch_size, max_length=args.max_length), tokenizer
    tokenizer, stop_ids = load_tokenizer(args.target_model) if args.target_model else (None, set())
    options = {"tokenizer": tokenizer, "stop_ids": stop_ids, "concurrency": args.concurrency}
    options["token_ids"] = args.token_ids
    return Server(args.base_url, args.served_model, **options), tokenizer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.generate_data", description="Conversations by the target.")
    add = parser.add_argument
    add("--output", required=True, help="JSON Lines file; one that is there is gone on with")
    add("--prompts", help="JSON Lines file, hf:// path, or data set (Hub id or folder); self-prompting if unset")
    add("--target_model", help="folder or Hub id; SmolLM2-135M-Instruct if unset. With --base_url only its tokenizer")
    add("--base_url", help="OpenAI-compatible server, as http://localhost:8000/v1; its key in OPENAI_API_KEY")
    add("--served_model", help="the target's name on the server; the first it lists if unset")
    add("--concurrency", type=int, default=8, help="requests at a time to the server (%(default)s)")
    add(
        "--token_ids",
        action="store_true",
        help="the server is vLLM: ask for token ids, to keep answers that are cut too",
    )
    add("--batch_size", type=int, default=8, help="rows per forward in this process (%(default)s)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the target in this process; float32 on a CPU, else the checkpoint's, if unset",
    )
    add("--max_length", type=int, default=2048, help="tokens of a conversation in this process (%(default)s)")
    add("--num_conversations", type=int, help=f"rows of the input; all if unset, {SELF_PROMPTED} self-prompted")
    add(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 0.7, 1.0],
        help="taken in turn by the rows (%(default)s)",
    )
    add("--seed", type=int, default=0, help="of all sampling (%(default)s)")
    add("--max_new_tokens", type=int, default=512, help="tokens of an answer at most (%(default)s)")
    add("--max_turns", type=int, help="answers of a conversation at most; if unset all of a row, one self-prompted")
    add("--max_minutes", type=float, help="begin no conversation after so many; no limit if unset")
    add_hub_arguments(parser)
    args = parser.parse_args(arguments)
    names = ("prompts", "num_conversations", "temperatures", "seed", "max_new_tokens", "max_turns", "max_minutes")
    counts = ("batch_size", "max_length", "concurrency", "num_conversations", "max_new_tokens", "max_turns")
    try:
        check_counts(**{name: getattr(args, name) for name in counts})  # before the target is loaded
        backend, tokenizer = _backend(args)
        manifest = generate_data(args.output, backend, tokenizer, **{name: getattr(args, name) for name in names})
        if args.push_to_hub:
            print("published:", publish("conversations", args.output, args.push_to_hub, manifest, args))
    except (OSError, ValueError, RequestFailed, RuntimeError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"\nstopped; what is in {args.output} is whole, and the same command goes on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
