"""Who answers: the target in this process, or a server that speaks OpenAI's protocol.

Both take requests as they come and give replies as they are ready, so that a finished answer's place is taken at once.
"""

import json
import os
import queue
import random
import struct
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from huggingface_hub.utils import httpx
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingTemperatureLogitsWarper,
)
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper

from data.chat_template import encode_conversation
from data.conversations import BadConversation, read_message
from data.hub import public_name
from data.target_signals import weights_fingerprint
from target_peagle import stop_token_ids


PAGE = 32  # tokens per page of the cache; the default of 256 would waste most of a short chat's last page
PREFILL = 512  # tokens of one forward at most: longer ones would let the answers under way wait
# Timeouts and what a server says of itself when it is busy or starting; all else would fail again.
BUSY = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Request:
    """Answer ``messages`` as the assistant or, where there is a ``text``, go on with that text.

    ``ends``: ids that end a continued text besides the target's own. ``seed``: 31 bits, above 0.
    """

    max_new_tokens: int
    temperature: float
    seed: int
    messages: list[dict] | None = None
    tools: list[dict] | None = None
    text: str | None = None
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reply:
    """``message``: the assistant's, with its text free of special tokens. ``ids``: the exact tokens, where known."""

    message: dict
    finish: Literal["stop", "length"]
    ids: list[int] | None = None


class RequestFailed(Exception):
    """The back end gave no answer; asking again later may help. ``reason``: short and stable, to count by."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}: it has to be at least 1")


class SeededSampling(ContinuousBatchingLogitsProcessor):
    """Adds Gumbel noise, so that the largest score is a draw from the softmax of the scores.

    The noise of a request is a function of its ``noise_seed`` and the token's position alone. So a row's tokens depend
    neither on the other rows of the batch nor on when it was started, as with a common random generator they would.
    A seed of 0 means no noise: greedy.
    """

    supported_kwargs = {"noise_seed": int}
    ignored_kwargs = ()

    def fill_defaults(self, int32_tensor):
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token):
        states = [request.state for request in requests_with_new_token]
        # The position counts the prompt too, so it stays right where a full cache made a request start anew.
        seeds = [(state.logit_processor_kwargs["noise_seed"], state.position_offset) for state in states]
        keys = [seed and zlib.crc32(struct.pack("<qq", seed, position)) for seed, position in seeds]
        return torch.from_numpy(np.array(keys, np.uint32).view(np.int32))

    def __call__(self, scores, tensor_arg):
        """``scores``: (rows, vocabulary). Counter-based, because a generator's state could not be in a CUDA graph."""
        keys = tensor_arg[: scores.size(0), None].long()
        bits = (keys << 32) + torch.arange(scores.size(1), device=scores.device)
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):  # SplitMix64, wrapping around
            bits = (bits ^ ((bits >> shift) & ((1 << 64 - shift) - 1))) * factor
        uniform = ((bits ^ (bits >> 31)) & ((1 << 53) - 1)).double() / 2**53 + 2**-54
        return scores + torch.where(keys == 0, 0, -(-uniform.log()).log()).float()


class InProcess:
    """The target itself, by transformers' continuous batching; use it as a context manager.

    Args:
        target, tokenizer: as `load_target` gives them.
        batch_size: rows per forward.
        max_length: longest conversation in tokens, answer included; the target's context if that is shorter.
            Memory for ``batch_size`` times as many is taken at the start.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 8,
        max_length: int = 2048,
    ):
        check_counts(batch_size=batch_size, max_length=max_length)
        self.target, self.tokenizer, self.batch_size = target, tokenizer, batch_size
        self.slots = 2 * batch_size  # as many wait for a place, so that none stays empty while Python thinks
        self.max_length = min(max_length, target.config.get_text_config().max_position_embeddings)
        self.settings = {"back_end": "in process", "target": public_name(target.name_or_path)}
        self.settings |= {"target_weights": weights_fingerprint(target), "max_length": self.max_length}
        if target.dtype != torch.float32:  # unnamed, so that what was begun before this was told can be gone on with
            self.settings["dtype"] = str(target.dtype).removeprefix("torch.")
        self.stop_ids = stop_token_ids(target.generation_config)
        self.stop_ids |= {i for i in [tokenizer.eos_token_id] if i is not None}
        self.ends = {}

    def __enter__(self):
        self.manager = None
        return self

    def __exit__(self, *error):
        if self.manager is not None:
            self.manager.stop(hard_stop=True)
            self.manager.destroy()

    def _start(self) -> None:
        """At the first request, because the cache takes memory and there may be nothing to ask."""
        page_size = PAGE if self.target.device.type == "cpu" else 256  # what flash attention takes
        config = ContinuousBatchingConfig(
            max_requests_per_batch=self.batch_size,
            max_batch_tokens=max(PREFILL, self.batch_size),
            # Otherwise most of the memory, as if nothing else used it. Its scheduler keeps a seventh of the pages free.
            num_blocks=-(-self.batch_size * self.max_length * 6 // 5 // page_size) + 1,
            page_size=page_size,
        )
        # Argmax, because SeededSampling draws; made anew, because the model's own may hold penalties and cut-offs.
        plain = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self.manager = self.target.init_continuous_batching(plain, config)
        steps = [ContinuousBatchingTemperatureLogitsWarper(TemperatureLogitsWarper(1.0)), SeededSampling()]
        self.manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList(steps))
        self.manager.logit_processor.tensors_required = len(steps)  # counted only where it converts them itself
        self.manager.start()

    def submit(self, name: str, request: Request) -> None:
        """Raises BadConversation where the template refuses the messages, or there is no room for the answer."""
        if request.text is None:
            ids = prompt_ids(self.tokenizer, request.messages, request.tools)
        else:
            ids = self.tokenizer(request.text, add_special_tokens=False)["input_ids"]
        if len(ids) + request.max_new_tokens > self.max_length:
            raise BadConversation("no room for an answer", f"{len(ids)} tokens before it, of {self.max_length}")
        if self.manager is None:
            self._start()
        self.ends[name] = self.stop_ids | set(request.ends)
        self.manager.add_request(
            ids,
            request_id=name,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=sorted(self.ends[name]),
            temperature=request.temperature or 1.0,
            noise_seed=request.seed if request.temperature else 0,
        )

    def receive(self) -> tuple[str, Reply | RequestFailed]:
        """Wait for the next reply. Raises RuntimeError where generation broke down."""
        while (result := self.manager.get_result(timeout=1)) is None:
            if not self.manager.is_running():
                raise RuntimeError("generation broke down") from self.manager.background_thread_status.fatal_error
        name, ids = result.request_id, result.generated_tokens
        if result.error is not None:
            return name, RequestFailed("no answer", result.error)
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        finish = "stop" if ids[-1] in self.ends.pop(name) else "length"
        return name, Reply({"role": "assistant", "content": text}, finish, ids)


def prompt_ids(tokenizer, messages: list[dict], tools: list[dict] | None) -> list[int]:
    """What the target reads before it answers, as training will see it. Raises BadConversation, as encoding does."""
    probe = {"messages": [*messages, {"role": "assistant"}], "tools": tools, "resp_ids": [0]}
    return encode_conversation(probe, tokenizer)[0][0].input_ids[:-1]


class Server:
    """A server with ``/chat/completions``, and ``/completions`` for self-prompting; use it as a context manager.

    Args:
        base_url: with the version, as http://localhost:8000/v1.
        model: its name there; the first that the server lists if unset.
        api_key: sent as the bearer token; by default what OPENAI_API_KEY holds.
        tokenizer: the target's, for self-prompting and to check what comes back.
        stop_ids: ids that end a turn besides the tokenizer's EOS.
        concurrency: requests at a time.
        token_ids: ask for the exact tokens too, by vLLM's ``return_token_ids``; answers cut at the limit can then be kept,
            and prompts with tools asked as tokens, which needs no parser of calls there.
        retries, first_wait: how often to ask a busy or absent server again, and after how many seconds; the wait
            doubles each time, up to a minute.
    """

    def __init__(
        self,
        base_url,
        model=None,
        *,
        api_key=None,
        tokenizer=None,
        stop_ids=(),
        concurrency=8,
        token_ids=False,
        retries=6,
        first_wait=1.0,
    ):
        check_counts(concurrency=concurrency)
        api_key = api_key or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=concurrency)  # 100 if unset
        self.client = httpx.Client(headers=headers, timeout=httpx.Timeout(600, connect=10), limits=limits)
        self.base_url, self.tokenizer, self.stop_ids = base_url.rstrip("/"), tokenizer, set(stop_ids)
        self.extras = {"return_token_ids": True} if token_ids else {}  # other servers may refuse what they do not know
        self.retries, self.first_wait, self.slots = retries, first_wait, concurrency
        self.replies, self.closed = queue.SimpleQueue(), threading.Event()
        self.model = model or self._ask("GET", "models", lambda reply: reply["data"][0]["id"])
        self.settings = {"back_end": "server", "target": public_name(self.model)}  # wherever it runs the next time
        self.settings |= {"token_ids": True} if token_ids else {}

    def __enter__(self):
        self.workers = ThreadPoolExecutor(self.slots)
        return self

    def __exit__(self, *error):
        self.closed.set()  # ends the waits between retries, so that an interrupted run stops at once
        self.workers.shutdown(wait=False, cancel_futures=True)
        self.client.close()

    def submit(self, name: str, request: Request) -> None:
        self.workers.submit(self._answer, name, request)

    def receive(self) -> tuple[str, Reply | RequestFailed | BadConversation]:
        """Wait for the next reply. Raises what was no fault of one request."""
        name, reply = self.replies.get()
        if not isinstance(reply, Reply | RequestFailed | BadConversation):
            raise reply
        return name, reply

    def _answer(self, name: str, request: Request) -> None:
        try:
            self.replies.put((name, self._reply(request)))
        except Exception as error:  # a thread's own exception would be lost, and the answer waited for in vain
            self.replies.put((name, error))

    def _reply(self, request: Request) -> Reply:
        options = {"model": self.model, "max_tokens": request.max_new_tokens}
        options |= {"temperature": request.temperature, "seed": request.seed} | self.extras
        if request.tools and self.extras and self.tokenizer is not None:
            # Written out here, as vLLM takes tools only where it was told how to parse the calls, and we keep the tokens.
            asked = {"prompt": prompt_ids(self.tokenizer, request.messages, request.tools)}
            return self._checked(self._ask("POST", "completions", read_choice, asked | options))
        if request.text is None:
            asked = {"messages": request.messages} | ({"tools": request.tools} if request.tools else {})
            return self._checked(self._ask("POST", "chat/completions", read_choice, asked | options))
        text, ends = request.text, set(request.ends) - self.stop_ids
        if self.tokenizer("")["input_ids"]:  # the server's tokenizer writes a second BOS
            text = text.removeprefix(self.tokenizer.bos_token or "")
        options |= {"stop": self.tokenizer.convert_ids_to_tokens(sorted(ends))} if ends else {}
        return self._checked(self._ask("POST", "completions", read_choice, {"prompt": text} | options))

    def _checked(self, reply: Reply) -> Reply:
        if self.extras and reply.ids is None:
            raise RequestFailed("no token ids", f"{self.base_url} knows no return_token_ids: ask without token_ids")
        return reply

    def _ask(self, method: str, path: str, read: Callable, body: dict | None = None):
        """What ``read`` makes of the server's JSON. Raises RequestFailed after the last retry or where the JSON is not
        the protocol's, BadConversation where the server refuses the request, ValueError where it would every one."""
        for attempt in range(self.retries + 1):
            wait = min(60, self.first_wait * 2**attempt) * random.uniform(0.5, 1)  # not all at the same moment
            try:
                response = self.client.request(method, f"{self.base_url}/{path}", json=body)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    try:
                        return read(response.json())
                    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                        told = f"{self.base_url}/{path} says {response.text[:300]!r} ({type(error).__name__}: {error})"
                        raise RequestFailed("odd reply", told) from error
                problem = f"{response.status_code} {response.text[:300]}"
                if response.status_code in (401, 403, 404):
                    raise ValueError(f"{self.base_url}/{path} says {problem}")
                if response.status_code not in BUSY:
                    raise BadConversation("server refused", problem)
                if response.headers.get("retry-after", "").isdigit():
                    wait = max(wait, int(response.headers["retry-after"]))
            if attempt == self.retries or self.closed.wait(wait):
                break
        raise RequestFailed("no answer", f"{self.base_url}/{path}: {problem}, asked {attempt + 1} times")


def read_choice(reply: dict) -> Reply:
    """The answer in a server's JSON. Whatever is not as the protocol has it raises one of Python's own errors."""
    choice = reply["choices"][0]
    given = choice["message"] if "message" in choice else {"content": choice["text"]}
    message = read_message({"role": "assistant", "content": given.get("content")}, 0, True)
    message |= {key: given[key] for key in ("tool_calls", "reasoning_content") if given.get(key)}
    if not all(call["id"] for call in message.get("tool_calls", ())):
        raise ValueError("a tool call without an id, which its result would have to name")
    json.dumps(message, ensure_ascii=False).encode()  # half of a surrogate pair could be neither asked nor written
    if (ids := choice.get("token_ids")) is not None and not (ids and all(type(token) is int for token in ids)):
        raise ValueError("token ids that are none")
    # Anything else, as the token limit or a filter, cut the answer off.
    return Reply(message, "stop" if choice["finish_reason"] in ("stop", "tool_calls") else "length", ids)
