"""The engine: a drafter with its target behind one class that takes text and chats, and gives text, tokens and numbers.

from generation_peagle import PEAGLEInference

engine = PEAGLEInference()
print(engine.chat([{"role": "user", "content": "Name three fruits."}]).text)
"""

import atexit
import re
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .decoding_peagle import DecodingStats
    from .target_peagle import load_target
except ImportError:
    from decoding_peagle import DecodingStats
    from target_peagle import load_target


ROOT = Path(__file__).resolve().parent
# Options of `speculative_generate` that plain decoding does not take, or takes for another way of drafting.
DRAFTING = ("num_assistant_tokens", "draft_tree", "draft_costs", "prompt_lookup_num_tokens")
# A token that stands for one byte. Tokenizers decode a run of them as a whole, either to text or each to a `\ufffd`.
BYTE = re.compile("<0x[0-9A-F]{2}>")


@dataclass
class Generation:
    """What the engine made of a prompt.

    text (`str`): The new tokens without special ones.
    tokens (`list[int]`): The new tokens, with the one that ended them if one did.
    stats ([`DecodingStats`]): What happened in each round; the properties here come from it.
    speedup (`float`, *optional*): Tokens per second, drafted over plain, both of one whole call with reading the prompt;
        None unless it was compared. The drafted call comes first, so that what only a first call costs counts against it.
    identical (`bool`, *optional*): Whether plain decoding gave the same tokens; None unless compared, and where they are
        sampled.
    """

    text: str
    tokens: list[int]
    stats: DecodingStats
    speedup: float | None = None
    identical: bool | None = None

    @property
    def acceptance_rate(self) -> float:
        """The share of the draft tokens that were kept, 0 if there were none. Of a tree one path can be kept at most."""
        return sum(self.stats.accepted) / max(sum(self.stats.nodes), 1)

    @property
    def tau(self) -> float:
        """Tokens per target forward, prefill excluded."""
        return self.stats.tau

    @property
    def acceptance_per_depth(self) -> list[float]:
        """Of the rounds that drafted so deep, the share that kept a token at this depth, and so all before it."""
        depths = range(max(self.stats.drafted, default=0))
        return [kept / tried for kept, tried in map(self.stats.depth_counts, depths)]

    @property
    def timings(self) -> dict[str, float]:
        """Seconds of `prefill`, `draft`, `verify` and `host` (the rest), and `total`, their sum."""
        return {
            part: getattr(self.stats, f"{part}_seconds") for part in ("prefill", "draft", "verify", "host", "total")
        }

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the total time."""
        return len(self.tokens) / self.stats.total_seconds


@dataclass
class StreamedToken:
    """One new token: its id, the text that it completes (perhaps none), and the depth that drafted it (0 is the first),
    None for the target's own."""

    token: int
    text: str
    depth: int | None


class TokenStream(Iterator):
    """Iterates over [`StreamedToken`]s. At the end `result` is the [`Generation`], before that None."""

    def __init__(self, tokens: Generator[StreamedToken, None, Generation], feed: "TokenFeed"):
        self._tokens, self._feed, self.result = tokens, feed, None

    def __next__(self) -> StreamedToken:
        try:
            return next(self._tokens)
        except StopIteration as end:
            self.result = self.result or end.value
            raise

    def close(self):
        """Stops decoding, after the forward that is running; from any thread. Dropping the stream does the same."""
        self._feed.closed = True
        with suppress(ValueError):  # another thread is reading: it will find the end
            self._tokens.close()


class StreamClosed(BaseException):
    """Nobody reads on. No error of decoding, so that no handler there takes it for one."""


class TokenFeed(BaseStreamer):
    """Turns tokens into [`StreamedToken`]s in `queue`, none of whose texts has half a character.

    A token that ends within a character waits for the one that completes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.stats, self.queue, self.closed = tokenizer, DecodingStats(), SimpleQueue(), False
        self.decoder, self.unread, self.waiting, self.shown = DecodeStream(skip_special_tokens=True), [], [], 0
        self.silent = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}

    def put(self, value: torch.Tensor):
        if self.closed:
            raise StreamClosed
        if not self.stats.origins:  # the prompt
            return
        token = value.item()
        self.unread.append(token)
        self.waiting.append(StreamedToken(token, "", self.stats.origins[-1]))
        # Bytes are decoded a run at a time, and tokens without text, unknown and special ones, do not end a run.
        word = self.tokenizer.backend_tokenizer.id_to_token(token)
        if word is not None and token not in self.silent and not BYTE.fullmatch(word):
            text, self.unread = self.decoder.step(self.tokenizer.backend_tokenizer, self.unread), []
            if text:
                self.release(text)

    def end(self):
        pass  # the result follows, see `finish`

    def finish(self, result: Generation):
        if self.waiting:
            self.release(result.text[self.shown :])
        self.queue.put(result)

    def release(self, text: str):
        self.waiting[-1].text = text
        self.shown += len(text)
        for token in self.waiting:
            self.queue.put(token)
        self.waiting = []


def load_drafter(checkpoint: str | Path | PreTrainedModel) -> PreTrainedModel:
    """Load a drafter from a folder or the Hub, with the code that lies beside it; a loaded one is only checked.

    Raises:
        FileNotFoundError: There is no such folder, or it has no config.json.
        ValueError: The model is no drafter.
    """
    drafter = checkpoint
    if not isinstance(checkpoint, torch.nn.Module):
        # A path that is none would be taken for a Hub id, and an error of the network would hide the cause.
        path, name = Path(checkpoint), str(checkpoint)
        if not (path / "config.json").is_file() and (path.exists() or name.count("/") != 1):
            raise FileNotFoundError(
                f"There is no drafter in {name}: name a folder that train_peagle.py made, or a Hub id."
            )
        drafter = AutoModel.from_pretrained(checkpoint, trust_remote_code=True)
    if "eagle_aux_hidden_state_layer_ids" not in drafter.config.to_dict():
        raise ValueError(f"{drafter.name_or_path} holds a {type(drafter).__name__}, which is no P-EAGLE drafter.")
    return drafter


class PEAGLEInference:
    """A target with its drafter. Nothing of the target changes; several threads may ask at once.

    Args:
        drafter_checkpoint: A folder or Hub id, or a loaded drafter, which moves to the target's device and dtype; None for
            the drafter in the folder of this file.
        target_model: A folder or Hub id, or a loaded causal language model; None for SmolLM2-135M-Instruct.
        speculation_depth (`int`, *optional*): Draft tokens per round (K), a chain; as many as pay if unset.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's. A loaded target needs it.
        loading: `dtype`, `device`, `attn_implementation` and `revision` of the target, see [`load_target`].

    Raises:
        FileNotFoundError, OSError: A model cannot be loaded.
        ValueError: The drafter is none, was made for another target, or was not trained for so many depths.
        TypeError: A loaded target came without its tokenizer or with options of loading, or it does not generate.
    """

    def __init__(
        self,
        drafter_checkpoint: str | Path | PreTrainedModel | None = None,
        target_model: str | Path | PreTrainedModel | None = None,
        speculation_depth: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **loading,
    ):
        self.drafter = load_drafter(ROOT if drafter_checkpoint is None else drafter_checkpoint)
        self.speculation_depth = speculation_depth
        if speculation_depth is not None:
            self.drafter.config.check_depth("speculation_depth", speculation_depth)
        if isinstance(target_model, torch.nn.Module):
            if tokenizer is None or loading:
                raise TypeError("With a loaded target pass its tokenizer= as well, and no options of loading.")
            self.target, self.tokenizer = target_model, tokenizer
        else:
            self.target, loaded = load_target(None if target_model is None else str(target_model), **loading)
            self.tokenizer = loaded if tokenizer is None else tokenizer
        self.drafter.prepare_for(self.target, self.tokenizer)

    def generate(
        self,
        prompt: str | list[int],
        max_tokens: int = 256,
        temperature: float = 0.0,
        draft_tree: int | list[tuple[int, ...]] | None = None,
        compare: bool = False,
        **options,
    ) -> Generation:
        """Continue a prompt.

        Args:
            prompt (`str` or `list[int]`): The text, or its token ids.
            max_tokens (`int`): New tokens at most.
            temperature (`float`): 0 for the most probable token each time; above it, tokens are sampled.
            draft_tree (`int` or `list[tuple[int, ...]]`, *optional*): See [`speculative_generate`].
            compare (`bool`): Decode plainly as well, for `speedup` and, greedily, `identical`. It is one run each beside
                whatever else the machine does: for a measurement take `evaluate_peagle.py`.
            options: Any other of `generate`, such as `top_p`, `stop_strings` or `prompt_lookup_num_tokens`.

        Raises:
            ValueError: The prompt is empty, too long for the target or no text or token ids; `max_tokens` is below 1; or an
                option cannot be decoded speculatively without changing the output.
        """
        call = self._call(prompt, max_tokens, temperature, draft_tree, options)
        if not compare:
            return self._decode(call, DecodingStats())
        plain_call = {name: value for name, value in call.items() if name not in DRAFTING}
        start = time.perf_counter()
        result = self._decode(call, DecodingStats())
        middle = time.perf_counter()
        tokens = new_tokens(self.target.generate(**plain_call), call)
        end = time.perf_counter()
        result.speedup = (len(result.tokens) / (middle - start)) / (len(tokens) / (end - middle))
        if not call["do_sample"]:  # two samples of one law need not be the same
            result.identical = result.tokens == tokens
        return result

    def stream(
        self,
        prompt: str | list[int],
        max_tokens: int = 256,
        temperature: float = 0.0,
        draft_tree: int | list[tuple[int, ...]] | None = None,
        **options,
    ) -> TokenStream:
        """Continue a prompt token by token, in a thread of its own that ends with the stream.

        The texts of all tokens are that of the whole. For the arguments and errors see [`generate`]; errors in decoding are
        raised where the tokens are read.
        """
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{type(self.tokenizer).__name__} cannot decode token by token: use a fast tokenizer, or generate."
            )
        feed = TokenFeed(self.tokenizer)
        return TokenStream(self._stream(self._call(prompt, max_tokens, temperature, draft_tree, options), feed), feed)

    def chat(
        self, messages: list[dict], tools: list | None = None, stream: bool = False, **options
    ) -> Generation | TokenStream:
        """Answer a chat. `options` are those of [`generate`] or, with `stream`, of [`stream`]; for the rest see [`chat_ids`]."""
        return (self.stream if stream else self.generate)(self.chat_ids(messages, tools), **options)

    def chat_ids(self, messages: list[dict], tools: list | None = None) -> list[int]:
        """The prompt that the tokenizer's chat template makes of a chat.

        Args:
            messages (`list[dict]`): Each with a `role` (system, user, assistant or tool) and a `content` that is text; an
                assistant's may have `tool_calls` in its place. The last one is not the assistant's.
            tools (`list`, *optional*): What may be called: JSON schemas, or functions with types and a docstring.

        Raises:
            ValueError: A message is not of this form, or the template is missing, refuses the chat or ignores the tools.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(
                "This tokenizer has no chat template: set tokenizer.chat_template, or write out the prompt for generate or "
                "stream."
            )
        if not isinstance(messages, list) or not messages:
            raise ValueError('A chat is a list of messages such as {"role": "user", "content": "Hello"}.')
        for number, message in enumerate(messages):
            match message:
                case {"role": "system" | "user" | "assistant" | "tool", "content": str()}:
                    pass
                case {"role": "assistant", "tool_calls": [_, *_]}:
                    pass
                case _:
                    raise ValueError(
                        f"Message {number} is {message!r}: it needs a role, which is system, user, assistant or tool, and a "
                        "content, which is text."
                    )
        if messages[-1]["role"] == "assistant":
            raise ValueError("The last message is the assistant's: end with the one that it is to answer.")

        def render(tools) -> list[int]:
            options = {"add_generation_prompt": True, "return_dict": True}
            return self.tokenizer.apply_chat_template(messages, tools=tools, **options)["input_ids"]

        try:
            ids = render(tools)
            ignored = bool(tools) and ids == render(None)
        except (TemplateError, TypeError) as error:  # templates fail on what they do not know as Python does
            raise ValueError(
                f"The chat template refuses this chat ({error}): leave out or rewrite what it does not know."
            ) from error
        if ignored:
            raise ValueError("The chat template ignores tools: describe them in the system prompt instead.")
        return ids

    def _call(self, prompt, max_tokens, temperature, draft_tree, options) -> dict:
        """What `speculative_generate` is called with."""
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        rows = self.target.get_input_embeddings().weight.shape[0]
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < rows for token in ids):
            raise ValueError(f"The prompt is neither text nor a list of token ids below {rows}; chats go to `chat`.")
        if refused := sorted({"num_return_sequences", "streamer", "stats"} & options.keys()):
            raise ValueError(f"The engine does not take {', '.join(refused)}: use target.generate or `stream`.")
        if type(max_tokens) is not int or max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens!r}: ask for at least one new token.")
        input_ids = torch.tensor([ids], dtype=torch.long, device=self.target.device)
        return {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "max_new_tokens": max_tokens,
            "do_sample": bool(temperature),
            **({"temperature": float(temperature)} if temperature else {}),
            "tokenizer": self.tokenizer,
            **({} if self.speculation_depth is None else {"num_assistant_tokens": self.speculation_depth}),
            **({} if draft_tree is None else {"draft_tree": draft_tree}),
            **options,
            "return_dict_in_generate": False,
        }

    def _decode(self, call: dict, stats: DecodingStats, streamer: BaseStreamer | None = None) -> Generation:
        sequences = self.drafter.speculative_generate(self.target, streamer=streamer, stats=stats, **call)
        tokens = new_tokens(sequences, call)
        return Generation(self.tokenizer.decode(tokens, skip_special_tokens=True), tokens, stats)

    def _stream(self, call: dict, feed: TokenFeed) -> Generator[StreamedToken, None, Generation]:
        def work():
            try:
                feed.finish(self._decode(call, feed.stats, feed))
            except BaseException as error:
                feed.queue.put(error)

        def stop():
            feed.closed = True
            worker.join()

        worker = threading.Thread(target=work, daemon=True)
        atexit.register(stop)  # Python may end while the stream is open
        worker.start()
        try:
            while isinstance(item := feed.queue.get(), StreamedToken):
                yield item
            if isinstance(item, StreamClosed):
                return None
            if isinstance(item, BaseException):
                raise item
            return item
        finally:
            stop()
            atexit.unregister(stop)


def new_tokens(sequences: torch.LongTensor, call: dict) -> list[int]:
    return sequences[0, call["input_ids"].shape[1] :].tolist()
