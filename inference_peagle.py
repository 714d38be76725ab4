"""The engine: a drafter with its target behind one class that takes text and chats, and gives text, tokens and numbers.

from generation_peagle import PEAGLEInference

engine = PEAGLEInference()
print(engine.chat([{"role": "user", "content": "Name three fruits."}]).text)
"""

import atexit
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer


# The repository root is both a folder of scripts and a remote-code package; only this form of import serves both.
try:
    from .decoding_peagle import DecodingStats
    from .published_peagle import is_published
    from .streaming_peagle import PlainFeed, StreamClosed, StreamedToken, TokenFeed, TokenStream
    from .target_peagle import hub_answers, load_target
except ImportError:
    from decoding_peagle import DecodingStats
    from published_peagle import is_published
    from streaming_peagle import PlainFeed, StreamClosed, StreamedToken, TokenFeed, TokenStream
    from target_peagle import hub_answers, load_target


ROOT = Path(__file__).resolve().parent
# Options of `speculative_generate` that plain decoding does not take, or takes for another way of drafting.
DRAFTING = ("num_assistant_tokens", "draft_tree", "draft_costs", "prompt_lookup_num_tokens")


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
        """Of the rounds that drafted, the share that kept a draft token at this depth, and so all before it."""
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


# What transformers raises over files that hold something else than it expects; RuntimeError for sizes beyond memory, too.
DAMAGE = (
    StrictDataclassError,
    AttributeError,
    KeyError,
    TypeError,
    RuntimeError,
    MemoryError,
    OverflowError,
    UnpicklingError,
)


def published_loader():
    """The class whose code a published drafter lacks; late, as its module imports this one."""
    try:
        from .modeling_peagle import PEagleModel
    except ImportError:
        from modeling_peagle import PEagleModel
    return PEagleModel


def load_drafter(checkpoint: str | Path | PreTrainedModel) -> PreTrainedModel:
    """Load a drafter from a folder or the Hub, with the code that lies beside it; a loaded one is only checked.

    EAGLE-3 and P-EAGLE drafters that others published come without such code and are loaded as well.

    Raises:
        FileNotFoundError: There is no such folder, or it has no config.json.
        ValueError: The model is no drafter, or a damaged one.
        OSError: The weights do not fit config.json, or the Hub does not give the drafter.
    """
    drafter = checkpoint
    if not isinstance(checkpoint, torch.nn.Module):
        # A path that is none would be taken for a Hub id, and an error of the network would hide the cause.
        path, name = Path(checkpoint), str(checkpoint)
        folder = (path / "config.json").is_file()
        if not folder and (path.exists() or name.count("/") != 1):
            raise FileNotFoundError(
                f"There is no drafter in {name}: name a folder that train_peagle.py made, or a Hub id."
            )
        online = not folder and hub_answers(name)
        where = {} if folder else {"local_files_only": not online}
        try:
            config, _ = PreTrainedConfig.get_config_dict(checkpoint, **where)
            loader = published_loader() if is_published(config) else AutoModel
            drafter = loader.from_pretrained(checkpoint, trust_remote_code=True, **where)
        except OSError as error:
            if folder:
                raise
            reason = str(error) if online else "the Hub did not answer, and the local cache does not hold it whole"
            raise OSError(
                f"There is no drafter in a folder {name}, and as a Hub id it could not be loaded: {reason}. Check the "
                "spelling and the network; for a gated or private one, accept its terms on its page and run `hf auth login`."
            ) from error
        except DAMAGE as error:
            # PyTorch's advice for a damaged file is to run whatever code it holds.
            said = "" if isinstance(error, UnpicklingError) else f": {error}"
            raise ValueError(
                f"The drafter in {name} cannot be loaded ({type(error).__name__}{said}). Its config.json or its weights are "
                "damaged, of a format that is not known here, or larger than the memory: copy or download them again."
            ) from error
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
        start = time.perf_counter()
        result = self._decode(call, DecodingStats())
        middle = time.perf_counter()
        tokens = self._decode(call, DecodingStats(), plain=True).tokens
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
        plain: bool = False,
        **options,
    ) -> TokenStream:
        """Continue a prompt token by token, in a thread of its own that ends with the stream.

        The texts of all tokens are that of the whole. `plain` decodes with the target's own `generate`, without the drafter.
        For the other arguments and the errors see [`generate`]; errors in decoding are raised where the tokens are read.
        """
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{type(self.tokenizer).__name__} cannot decode token by token: use a fast tokenizer, or generate."
            )
        feed = (PlainFeed if plain else TokenFeed)(self.tokenizer)
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

    def _decode(
        self, call: dict, stats: DecodingStats, streamer: BaseStreamer | None = None, plain: bool = False
    ) -> Generation:
        if plain:
            call = {name: value for name, value in call.items() if name not in DRAFTING}
            sequences = self.target.generate(streamer=streamer, **call)
        else:
            sequences = self.drafter.speculative_generate(self.target, streamer=streamer, stats=stats, **call)
        tokens = sequences[0, call["input_ids"].shape[1] :].tolist()
        return Generation(self.tokenizer.decode(tokens, skip_special_tokens=True), tokens, stats)

    def _stream(self, call: dict, feed: TokenFeed) -> Generator[StreamedToken, None, Generation]:
        def work():
            try:
                feed.finish(self._decode(call, feed.stats, feed, plain=isinstance(feed, PlainFeed)))
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
