"""The Gradio Space: one chat, answered plainly and with P-EAGLE, side by side: `python app.py`.

Both columns have the same target with the same prepared layers, and one after the other, so that neither slows the other.
All that belongs to a visitor lies in the session's state; of the models nothing changes while they decode.
"""

try:  # on ZeroGPU; there it has to come before torch
    from spaces import GPU
except ImportError:

    def GPU(duration: int):
        return lambda function: function


import argparse
import html
import os
import time
import unicodedata
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field

import gradio as gr
from huggingface_hub import metadata_load

from data.chat_template import fit_template
from data.conversations import BadConversation, read_tools
from data.hub import public_name
from decoding_peagle import DecodingStats, position_limit
from inference_peagle import ROOT, Generation, PEAGLEInference
from prepack_peagle import prepack
from streaming_peagle import StreamedToken, TokenStream


WAYS = {"plain": "Plain decoding", "drafted": "P-EAGLE"}
ORDERS = {"P-EAGLE first": ("drafted", "plain"), "plain first": ("plain", "drafted")}
AUTO, CHAIN, TREE = "auto: as many as pay", "a chain of K", "a tree"
MOST_TOKENS, MOST_NODES, HOTTEST = 512, 63, 2
LONGEST = 20_000  # characters of a text that are looked at at all
WAITING = 20  # chats that wait for their turn; who comes then is asked to come later
INTERVAL = 0.1  # seconds between two states shown: showing takes time from decoding
GPU_SECONDS = 120

WEATHER = """[{"type": "function", "function": {"name": "get_weather", "description": "The weather of a day.",
  "parameters": {"type": "object", "required": ["city", "day"],
    "properties": {"city": {"type": "string"}, "day": {"type": "string"}}}}}]"""
EXAMPLES = {  # message, system prompt, tools
    "a question": ["Name three fruits.", "", ""],
    "code": ["Write a Python function that returns the longest word in a sentence.", "", ""],
    "a system prompt": ["It is raining. What could I do?", "You are a friendly poet who answers briefly.", ""],
    "a tool": ["Will I need an umbrella in Lisbon tomorrow?", "", WEATHER],
}

CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}  # to the signs that picture them
CONTROLS |= {0x7F: 0x2421} | dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)

INTRODUCTION = """# P-EAGLE: several tokens per forward, the same output
A small drafter proposes tokens, **{target}** checks them all in one forward and keeps what it would have said itself.
In the right column colours show at which depth of a draft a token was proposed; tokens without colour are the target's own.
Both columns use the same target, one after the other, so neither slows the other down; one chat is answered at a time, others
wait in a queue."""
MISSING = """# P-EAGLE: the models could not be loaded
{error}

Whoever runs this page names them by `DRAFTER` and `TARGET`, in the environment or as `--drafter` and `--target`: folders or
Hub ids, the pair of this folder if unset."""
# A scope of its own is put around it. Double braces would be taken for a template's.
CSS = """
.turn { margin-bottom: 1.5em; }
.message { background: var(--background-fill-secondary); border-radius: 8px; padding: .5em .8em; margin-bottom: .6em; }
.message, .text { white-space: pre-wrap; overflow-wrap: anywhere; }
.columns { display: grid; grid-template-columns: 1fr 1fr; gap: .8em; }
@media (max-width: 640px) { .columns { grid-template-columns: 1fr; } }
.column { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: .6em .8em; min-width: 0; }
.column h4 { margin: 0 0 .4em; }
.column h4 small, .numbers, .bars { color: var(--body-text-color-subdued); font-weight: normal; font-size: .85em; }
.text { min-height: 3em; line-height: 1.6; }
.numbers { margin-top: .6em; }
.numbers b { color: var(--body-text-color); font-size: 1.25em; }
.text span, .bar { color: #111; border-radius: 3px; background: hsl(var(--hue) 75% 78%); }
.bars { display: grid; grid-template-columns: auto 1fr; gap: .2em .6em; align-items: center; margin-top: .4em; }
.bar { padding: 0 .3em; min-width: 3em; }
.verdict { margin-top: .6em; display: inline-block; padding: .15em .7em; border-radius: 1em;
  border: 1px solid var(--border-color-primary); }
.verdict.same { background: #15803d; color: white; }
.verdict.differ { background: #b91c1c; color: white; }
"""


def shown(text: str) -> str:
    """Any text as HTML that shows it: markup and control characters too are seen, and do nothing."""
    return html.escape(text.translate(CONTROLS))


@dataclass
class Answer:
    """What one way has made of a turn so far. `rate`: tokens per second from the first new token on, 0 while none followed."""

    tokens: list[StreamedToken] = field(default_factory=list)
    stats: DecodingStats = field(default_factory=DecodingStats)
    state: str = "waits"
    rate: float = 0.0

    def follow(self, stream: TokenStream) -> Iterator[None]:
        """Take in the tokens of `stream`, and stop where there is something new to be shown."""
        self.state, self.stats, first, last = "reads the prompt", stream.stats, None, 0.0
        with closing(stream):
            yield
            for token in stream:
                now = time.perf_counter()
                self.tokens.append(token)
                if first is None:
                    self.state, first = "decodes", now
                else:
                    self.rate = (len(self.tokens) - 1) / (now - first)
                if now - last > INTERVAL:
                    last = now
                    yield
        self.state = "done"
        if len(self.tokens) > 1:  # by the clock of the decoding thread, which knows nothing of what is shown
            self.rate = (len(self.tokens) - 1) / (self.stats.total_seconds - self.stats.prefill_seconds)
        yield

    @property
    def ids(self) -> list[int]:
        return [token.token for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def forwards(self) -> int:
        """Forwards of the target, that over the prompt included."""
        return bool(self.tokens) + len(self.stats.emitted)

    @property
    def kept_per_depth(self) -> list[float]:
        rounds = len(self.stats.emitted)  # the decoding thread may be in the midst of recording another
        stats = DecodingStats(drafted=self.stats.drafted[:rounds], accepted=self.stats.accepted[:rounds])
        return Generation(self.text, self.ids, stats).acceptance_per_depth


@dataclass
class Turn:
    """A message and its two answers. `order`: of the ways; `temperature`: 0 is greedy; `dtype`: of the target."""

    message: str
    order: tuple[str, str]
    temperature: float
    dtype: str
    answers: dict[str, Answer] = field(default_factory=lambda: {way: Answer() for way in WAYS})

    @property
    def text(self) -> str:
        """What the chat goes on with."""
        return self.answers["drafted"].text or self.answers["plain"].text

    def verdict(self, running: bool) -> tuple[str, str]:
        """A class for the badge and what it says."""
        plain, drafted = (self.answers[way].ids for way in WAYS)
        count, done = min(len(plain), len(drafted)), all(answer.state == "done" for answer in self.answers.values())
        if self.temperature:
            return "open", "sampled: both columns follow the target's law, with draws of their own"
        parting = next((i for i in range(count) if plain[i] != drafted[i]), None)
        if parting is None and done and len(plain) != len(drafted):
            parting = count
        if parting is not None:
            rounding = "" if self.dtype == "float32" else f" (in {self.dtype} near ties may fall the other way)"
            return "differ", f"✗ outputs differ from new token {parting + 1} on{rounding}"
        if done:
            return "same", f"✓ outputs identical: {count} of {count} tokens"
        compared = f"{count} tokens compared, all the same" if count else "nothing to compare"
        return "open", f"{'so far' if running else 'stopped,'} {compared}"

    def html(self, running: bool = False) -> str:
        columns = "".join(self.column(way, running) for way in WAYS)
        kind, verdict = self.verdict(running)
        return (
            f'<div class="turn"><div class="message">{shown(self.message)}</div><div class="columns">{columns}</div>'
            f'<div class="verdict {kind}">{verdict}</div></div>'
        )

    def column(self, way: str, running: bool) -> str:
        answer = self.answers[way]
        text = "".join(
            shown(token.text)
            if token.depth is None
            else f'<span class="d{token.depth}" title="depth {token.depth + 1}">{shown(token.text)}</span>'
            for token in answer.tokens
        )
        place = ("first", "second")[self.order.index(way)]
        state = answer.state if running or answer.state == "done" else "stopped"
        count, forwards = len(answer.tokens), answer.forwards
        rate = f"{answer.rate:.1f}" if answer.rate else "–"
        numbers = f"<b>{rate}</b> tokens/s · {count} token{'s' * (count != 1)} · {forwards} target forward{'s' * (forwards != 1)}"
        bars = ""
        if way == "drafted":
            tau = f"{answer.stats.tau:.2f}" if answer.stats.emitted else "–"  # the prompt's forward counts for none
            numbers += f", {max(count - forwards, 0)} saved · tau <b>{tau}</b>"
            plain = self.answers["plain"]
            if plain.state == answer.state == "done" and plain.rate and answer.rate:
                numbers += f" · {answer.rate / plain.rate:.2f}x plain, in this one run"
            bars = "".join(
                f'<span>depth {depth + 1}</span><span class="bar d{depth}" style="width: {share:.0%}">{share:.0%}</span>'
                for depth, share in enumerate(answer.kept_per_depth)
            )
            bars = bars and f'<div class="bars"><span>kept</span><span>of the drafts this deep</span>{bars}</div>'
            if answer.state == "done" and not any(answer.stats.nodes):
                bars = '<div class="bars">Nothing was drafted: it would not have paid here.</div>'
        return (
            f'<section class="column {way}"><h4>{WAYS[way]} <small>{place}, {state}</small></h4>'
            f'<div class="text" dir="auto">{text}</div><div class="numbers">{numbers}</div>{bars}</section>'
        )


class Refused(gr.Error):
    """What a visitor entered cannot be answered. That is no fault of the server, whose log gets no traceback."""

    def __init__(self, message: str):
        super().__init__(message, print_exception=False)


def checked(name: str, text: str | None) -> str:
    """The text of a field, or Refused where no model should get it."""
    text = (text or "").replace("\r\n", "\n")
    if len(text) > LONGEST:
        raise Refused(f"{name} has {len(text)} characters: shorten it to {LONGEST}.")
    for place, character in enumerate(text, start=1):
        if character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs"):
            raise Refused(f"{name} has a control character, U+{ord(character):04X}, at place {place}: remove it.")
    return text


def between(name: str, value, least: int, most: int) -> float:
    """The number of a field, or Refused for anything else: whoever asks by the API can send what no slider does."""
    if type(value) not in (int, float) or not least <= value <= most:
        raise Refused(f"{name} must be a number from {least} to {most}, not {shown(repr(value))}.")
    return value


def prompt_ids(engine: PEAGLEInference, turns: list[Turn], message: str, system: str, tools: str) -> list[int]:
    """The chat as the template writes it. Where that knows no tools or no system prompt, they are written as text."""
    chat = [{"role": "system", "content": system}] if system.strip() else []
    for turn in turns:
        if turn.text:
            chat.append({"role": "user", "content": turn.message})
            chat.append({"role": "assistant", "content": turn.text})
    chat.append({"role": "user", "content": message})
    try:
        return fit_template(engine.tokenizer, chat, read_tools(tools.strip() or None), prompt=True)[0].ids
    except BadConversation as error:
        raise Refused(f"This chat cannot be put to the model, {shown(str(error))}.") from error


def answer(
    engine: PEAGLEInference,
    turns: list[Turn],
    message: str,
    system: str,
    tools: str,
    drafting: str,
    depth: int,
    nodes: int,
    temperature: float,
    max_tokens: int,
    order: str,
) -> Iterator[tuple]:
    """Answer a message both ways. Yields the HTML of the earlier turns and of this one, all turns, and the emptied field.

    Raises gr.Error: What was entered cannot be answered (Refused), or decoding failed; the message says why.
    """
    message, system = checked("The message", message), checked("The system prompt", system)
    tools = checked("The list of tools", tools)
    if all(
        unicodedata.category(character)[0] in "CZ" for character in message
    ):  # nor is one of invisible signs a message
        raise Refused("Write a message first.")
    depth = int(between("K", depth, 1, engine.drafter.config.num_depths))
    nodes = int(between("The number of draft tokens", nodes, 1, MOST_NODES))
    max_tokens = int(between("The number of new tokens", max_tokens, 1, MOST_TOKENS))
    temperature = between("The temperature", temperature, 0, HOTTEST)
    ids, limit = prompt_ids(engine, turns, message, system, tools), position_limit(engine.target)
    if len(ids) + max_tokens > limit:
        raise Refused(
            f"The chat has {len(ids)} tokens, and with {max_tokens} new ones exceeds the target's {limit}: shorten the message, "
            "ask for fewer tokens or clear the chat."
        )
    dtype = str(engine.target.dtype).removeprefix("torch.")
    turn = Turn(message, ORDERS[order], float(temperature), dtype)
    earlier, turns = "".join(each.html() for each in turns), [*turns, turn]
    options = {"num_assistant_tokens": depth, "draft_tree": {AUTO: "auto", CHAIN: None, TREE: nodes}[drafting]}
    try:
        for way in turn.order:
            stream = engine.stream(
                ids, max_tokens=max_tokens, temperature=turn.temperature, plain=way == "plain", **options
            )
            for _ in turn.answers[way].follow(stream):
                yield earlier, turn.html(running=True), turns, ""
    except Exception as error:
        yield earlier, turn.html(), turns, message
        raise gr.Error(f"Decoding failed: {shown(str(error))}") from error


def stop(turns: list[Turn]) -> str:
    """The HTML of the newest turn once its decoding was cancelled."""
    return turns[-1].html() if turns else ""


def load(drafter=None, target=None, **loading) -> PEAGLEInference:
    """The engine for the page; what is not given is what `DRAFTER` and `TARGET` name in the environment, and where neither
    does what the card of a Space names."""
    drafter, target = drafter or os.environ.get("DRAFTER") or None, target or os.environ.get("TARGET") or None
    if drafter is None and target is None:
        drafter, target = (metadata_load(ROOT / "README.md") or {}).get("models", (None, None))
    engine = PEAGLEInference(drafter, target, **loading)
    for model in (engine.target, engine.drafter):
        with suppress(ValueError):  # on a GPU and in other dtypes than float32 nothing is to be prepared
            prepack(model)
    return engine


def build_demo(drafter=None, target=None, **loading) -> gr.Blocks:
    """The page, to be launched; for the arguments see [`PEAGLEInference`]. If it cannot load the models it says why."""
    with gr.Blocks(title="P-EAGLE") as demo:
        try:
            engine = load(drafter, target, **loading)
        except (OSError, ValueError, TypeError) as error:
            print(f"The models could not be loaded: {error}")
            gr.Markdown(MISSING.format(error=shown(str(error))))
            return demo
        config = engine.drafter.config
        gr.Markdown(INTRODUCTION.format(target=public_name(engine.target.name_or_path or "the target")))
        turns = gr.State([])
        colours = "\n".join(f".d{d} {{ --hue: {(145 + 67 * d) % 360}; }}" for d in range(config.num_depths))
        earlier, newest = (gr.HTML(css_template=CSS + colours, elem_id=name) for name in ("earlier", "newest"))
        message = gr.Textbox(label="Message", placeholder="Ask something", max_length=LONGEST, autofocus=True)
        with gr.Row():
            send = gr.Button("Send", variant="primary", min_width=90)
            stopping, clear = gr.Button("Stop", min_width=90), gr.Button("Clear", min_width=90)
        with gr.Row():
            drafting = gr.Radio([AUTO, CHAIN, TREE], value=AUTO, label="Draft per round")
            depth = gr.Slider(1, config.num_depths, config.speculation_depth, step=1, label="K, the deepest draft")
            nodes = gr.Slider(1, MOST_NODES, 16, step=1, label="Draft tokens of a tree")
        with gr.Row():
            order = gr.Radio(list(ORDERS), value="P-EAGLE first", label="One after the other")
            temperature = gr.Slider(0, HOTTEST, 0, step=0.05, label="Temperature, 0 is greedy")
            max_tokens = gr.Slider(1, MOST_TOKENS, 128, step=1, label="New tokens at most")
        with gr.Accordion("System prompt and tools", open=False):
            system = gr.Textbox(label="System prompt", lines=2, max_length=LONGEST)
            tools = gr.Textbox(label="Tools, a list of JSON schemas", lines=4, max_length=LONGEST)
        gr.Examples(list(EXAMPLES.values()), [message, system, tools], example_labels=list(EXAMPLES), label="Examples")

        @GPU(duration=GPU_SECONDS)
        def respond(turns, message, system, tools, drafting, depth, nodes, temperature, max_tokens, order):
            yield from answer(
                engine, turns, message, system, tools, drafting, depth, nodes, temperature, max_tokens, order
            )

        run = gr.on(
            [send.click, message.submit],
            respond,
            [turns, message, system, tools, drafting, depth, nodes, temperature, max_tokens, order],
            [earlier, newest, turns, message],
            api_name="answer",
            concurrency_limit=1,  # two at a time would take twice as long each, and spoil the times
            show_progress="minimal",
            show_progress_on=message,
        )
        stopping.click(None, cancels=run).then(stop, turns, newest, queue=False, api_name="stop")
        clear.click(None, cancels=run).then(
            lambda: ("", "", [], ""), None, [earlier, newest, turns, message], queue=False, api_name="clear"
        )
    return demo.queue(max_size=WAITING)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("drafter", "target"):
        help = f"folder or Hub id; {name.upper()} of the environment if unset, and else that of this folder's pair"
        parser.add_argument(f"--{name}", help=help)
    build_demo(**vars(parser.parse_args())).launch()


if __name__ == "__main__":
    main()
