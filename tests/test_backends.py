"""The two back ends: batched answers are those of plain generation, sampling is seeded by row, and a real server."""

import json
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from chats import TOOLS, chatml, gemma
from conftest import GEMMA, WINDOW, plain
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from data.backends import InProcess, Request, RequestFailed, SeededSampling, Server, prompt_ids
from data.conversations import read_jsonl
from data.generate_data import generate_data
from tests.test_generate_data import (  # noqa: F401
    USER,
    folder,
    make_target,
    run,
    target,
    tokenizer,
    write_prompts,
    write_rows,
)


def answer_all(backend, requests):
    with backend:
        for name, request in requests.items():
            backend.submit(name, request)
        return {name: reply.ids for name, reply in (backend.receive() for _ in requests)}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_batched_answers_with_refill_are_those_of_plain_generate(family, tokenizer, target):  # noqa: F811
    if family == "gemma3":
        tokenizer = gemma()
        target = make_target(tokenizer, Gemma3ForCausalLM, Gemma3TextConfig, **GEMMA)
    requests = {}
    for i in range(7):  # more than the batch holds, and longer than Gemma's window
        text = f"{i} word " * (3 * i + 1)
        requests[f"r{i}"] = Request(8 + 3 * i, 0.0, 1, text=text)
        assert i == 0 or len(tokenizer(text)["input_ids"]) > WINDOW
    answers = answer_all(InProcess(target, tokenizer, batch_size=3, max_length=256), requests)
    for name, request in requests.items():
        ids = torch.tensor([tokenizer(request.text, add_special_tokens=False)["input_ids"]])
        assert answers[name] == plain(target, ids, max_new_tokens=request.max_new_tokens)[0, ids.shape[1] :].tolist()
    assert len({tuple(ids) for ids in answers.values()}) > 4  # the prompts matter


def test_nothing_is_started_where_there_is_nothing_to_ask(target, tokenizer, tmp_path, monkeypatch):  # noqa: F811
    options = {"prompts": write_prompts(tmp_path / "prompts.jsonl", 2), "max_new_tokens": 2}
    made = run(tmp_path / "out.jsonl", target, tokenizer, **options)
    monkeypatch.setattr(target, "init_continuous_batching", None)  # calling it would fail
    assert run(tmp_path / "out.jsonl", target, tokenizer, **options) == made


def test_sampled_answers_depend_on_the_seed_and_not_on_the_batch(target, tokenizer):  # noqa: F811
    def sample(batch_size, seed, names):
        requests = {str(n): Request(20, 1.0, seed + n, messages=[USER]) for n in names}
        answers = answer_all(InProcess(target, tokenizer, batch_size=batch_size, max_length=256), requests)
        return [answers[str(n)] for n in range(6)]

    alone = sample(1, 10, range(6))
    assert alone == sample(4, 10, reversed(range(6)))
    assert alone != sample(4, 20, range(6)) and len({tuple(ids) for ids in alone}) > 3


def test_seeded_sampling_draws_from_the_softmax():
    scores = torch.tensor([[2.0, 0.0, 1.0, -1.0, 0.5]]).repeat(20000, 1)
    keys = torch.arange(1, 20001, dtype=torch.int32)
    counts = torch.bincount(SeededSampling()(scores, keys).argmax(-1), minlength=5)
    expected = 20000 * scores[0].softmax(-1)
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom, p = 0.001
    flatter = 20000 * (scores[0] / 1.2).softmax(-1)
    assert ((counts - flatter) ** 2 / flatter).sum() > 100
    assert torch.equal(SeededSampling()(scores[:3], torch.zeros(3, dtype=torch.int32)), scores[:3])


def test_an_absent_server_fails_every_row(tmp_path):
    backend = Server("http://127.0.0.1:9/v1", "some", retries=1, first_wait=0.01, concurrency=2)
    with pytest.raises(ValueError, match="3 failed: no answer .*asked 2 times"):
        generate_data(tmp_path / "o", backend, None, prompts=write_prompts(tmp_path / "p.jsonl", 3), progress=False)
    with pytest.raises(RequestFailed):  # it cannot be asked for its models either
        Server("http://127.0.0.1:9/v1", retries=0)


@pytest.fixture
def serve():
    """Starts a server that answers each POST with what a function makes of its JSON; gives its address."""
    servers = []

    class WideServer(ThreadingHTTPServer):
        request_queue_size = 256  # of the 5 that it takes by itself, all others wait seconds for their next try

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_POST(self):
                said = answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.send_header("content-length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

        servers.append(WideServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def said(finish="stop", **message):
    return json.dumps({"choices": [{"message": message, "finish_reason": finish}]}).encode()


ODD = [
    b'{"choices": []}',
    b'{"error": "overloaded"}',
    b'{"choices": [{"message": null, "finish_reason": "stop"}]}',
    b"<html>Welcome",
    b"[" * 100000,
    said(content=5),
    said(content="x \ud83d"),
    said(content=None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]),
    said(content=None, tool_calls=[{"id": None, "function": {"name": "f", "arguments": "{}"}}]),
    b'{"choices": [{"message": {"content": "x"}, "finish_reason": "length", "token_ids": ["a"]}]}',
]


def test_an_odd_reply_fails_its_row_and_no_other(serve, tmp_path):
    def answer(body):
        asked = int(body["messages"][0]["content"].strip("Question ?"))
        return ODD[asked] if asked < len(ODD) else said(content=[{"type": "text", "text": "Fine."}])

    backend = Server(serve(answer), "some", retries=0, concurrency=2)
    prompts = write_prompts(tmp_path / "prompts.jsonl", len(ODD) + 2)
    counts = generate_data(tmp_path / "out.jsonl", backend, None, prompts=prompts, progress=False)["counts"]
    assert counts == {"in": len(ODD) + 2, "done": 2, "failed: odd reply": len(ODD)}
    answers = [row["messages"][-1] for _, row in read_jsonl(tmp_path / "out.jsonl")]
    assert answers == [{"role": "assistant", "content": "Fine."}] * 2


def test_as_many_requests_wait_for_the_server_as_were_allowed(serve, tmp_path):
    together = threading.Barrier(120)

    def answer(body):
        together.wait(timeout=60)  # for all 120 of them
        return said(content="Fine.")

    backend = Server(serve(answer), "some", retries=0, concurrency=120)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 120)
    counts = generate_data(tmp_path / "out.jsonl", backend, None, prompts=prompts, progress=False)["counts"]
    assert counts == {"in": 120, "done": 120}


def test_a_cut_answer_is_kept_with_the_tokens_that_the_server_tells(serve, tokenizer, tmp_path):  # noqa: F811
    asked = []

    def answer(body):
        asked.append(body)
        ids = tokenizer("An answer that goes on and", add_special_tokens=False)["input_ids"]
        choice = {"message": {"content": tokenizer.decode(ids)}, "finish_reason": "length"}
        return json.dumps(
            {"choices": [choice | ({"token_ids": ids} if body.get("return_token_ids") else {})]}
        ).encode()

    url, prompts = serve(answer), write_prompts(tmp_path / "prompts.jsonl", 2)
    options = {"prompts": prompts, "progress": False}
    backend = Server(url, "some", tokenizer=tokenizer, token_ids=True)
    assert generate_data(tmp_path / "with.jsonl", backend, tokenizer, **options)["counts"]["done"] == 2
    for _, row in read_jsonl(tmp_path / "with.jsonl"):
        assert (row["finish"], tokenizer.decode(row["resp_ids"])) == ("length", row["messages"][-1]["content"])
    with pytest.raises(ValueError, match="2 skipped: answer hit the length limit"):
        generate_data(tmp_path / "without.jsonl", Server(url, "some", tokenizer=tokenizer), tokenizer, **options)
    assert not any("return_token_ids" in body for body in asked[2:]) and len(asked) == 4  # unknown to other servers
    url = serve(lambda body: said(content="An answer."))  # one that does not know it
    with pytest.raises(ValueError, match="2 failed: no token ids"):
        generate_data(
            tmp_path / "ignored.jsonl", Server(url, "some", tokenizer=tokenizer, token_ids=True), tokenizer, **options
        )


def test_prompts_with_tools_are_asked_as_the_tokens_that_training_sees(serve, tmp_path):
    hermes, asked = chatml(TOOLS), []

    def answer(body):
        asked.append(body)
        text = '{"name": "f"}'
        ids = hermes(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
        said = {"message": {"content": text}} if "messages" in body else {"text": text}
        return json.dumps({"choices": [said | {"token_ids": ids, "finish_reason": "stop"}]}).encode()

    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    rows = [{"messages": [USER], "tools": tools}, {"messages": [USER]}]
    options = {"prompts": write_rows(tmp_path / "prompts.jsonl", rows), "progress": False}
    backend = Server(serve(answer), "some", tokenizer=hermes, token_ids=True, concurrency=1)
    generate_data(tmp_path / "out.jsonl", backend, hermes, **options)
    assert asked[0]["prompt"] == prompt_ids(hermes, [USER], tools) != prompt_ids(hermes, [USER], None)
    assert "messages" not in asked[0] and "tools" not in asked[0] and asked[1]["messages"] == [USER]
    for (_, row), given in zip(read_jsonl(tmp_path / "out.jsonl"), (tools, None), strict=True):
        assert row.get("tools") == given and hermes.decode(row["resp_ids"]) == '{"name": "f"}<|im_end|>'
    # Another server knows no token ids, and is asked in the protocol's own words.
    generate_data(tmp_path / "other.jsonl", Server(serve(answer), "some", tokenizer=hermes), hermes, **options)
    assert any(body.get("tools") == tools and "prompt" not in body for body in asked[2:])


def test_what_was_finished_before_its_turn_outlives_a_kill(serve, tmp_path):
    asked, others = [], threading.Event()

    def answer(body):
        asked.append(body["messages"][0]["content"])
        if len(asked) >= 5:
            others.set()
        if asked[-1] == first:  # the slow one, before which no other row can be written
            others.wait(20)
        return said(content=f"Answer to {asked[-1]}")

    class Killed(Server):
        def receive(self):
            name, reply = super().receive()
            if name == "0":
                raise KeyboardInterrupt
            return name, reply

    output, rows = tmp_path / "out.jsonl", [{"id": i, "prompt": f"Question number {i}?"} for i in range(5)]
    prompts, first = write_rows(tmp_path / "prompts.jsonl", rows), "Question number 0?"
    url, options = serve(answer), {"prompts": prompts, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        generate_data(output, Killed(url, "some", concurrency=2), None, **options)
    ahead = tmp_path / "out.jsonl.ahead"
    assert output.stat().st_size == 0 and ahead.stat().st_size
    ahead.write_bytes(ahead.read_bytes() + b'{"row": {"id": "4", "mess')  # and in the middle of a write
    kept = len(ahead.read_bytes().splitlines()) - 1
    with pytest.raises(ValueError, match="seed 0, not 1"):  # they bind the settings as rows do
        generate_data(output, Server(url, "some"), None, **options, seed=1)
    del asked[:]
    fewer = generate_data(output, Server(url, "some"), None, **options, num_conversations=1)["counts"]
    assert fewer == {"in": 1, "done": 1} and ahead.exists()  # what the others wait with is not thrown away
    assert generate_data(output, Server(url, "some"), None, **options)["counts"] == {"in": 5, "done": 5}
    assert first in asked and len(asked) == 5 - kept < 5 and not ahead.exists()
    answers = [(row["id"], row["messages"][-1]["content"]) for _, row in read_jsonl(output)]
    assert answers == [(str(i), f"Answer to Question number {i}?") for i in range(5)]


def test_a_real_server(folder, target, tokenizer, tmp_path):  # noqa: F811
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", folder]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        # Asked before it is up, so that the first requests have to be repeated.
        options = {"tokenizer": tokenizer, "stop_ids": target.generation_config.eos_token_id, "concurrency": 2}
        backend = Server(f"http://127.0.0.1:{port}/v1", folder, retries=60, first_wait=0.5, **options)
        output, settings = tmp_path / "out.jsonl", {"max_new_tokens": 40, "progress": False}
        rows = [{"id": i, "prompt": str(7919**i)} for i in (2, 3, 4, 5, 8, 9)]
        settings |= {"prompts": write_rows(tmp_path / "prompts.jsonl", rows), "temperatures": (0.0,)}
        counts = generate_data(output, backend, tokenizer, **settings)["counts"]
        assert counts["in"] == 6 == counts["done"] + sum(n for key, n in counts.items() if "skipped" in key)
        own, _ = run(tmp_path / "own.jsonl", target, tokenizer, **settings)
        texts = {
            row["id"]: row["messages"] for row in own if row["finish"] == "stop"
        }  # it tells no tokens of the others
        assert {row["id"]: row["messages"] for _, row in read_jsonl(output)} == texts and len(texts) > 1
        assert all("resp_ids" not in row for _, row in read_jsonl(output))
        backend = Server(f"http://127.0.0.1:{port}/v1", folder, **options)
        try:  # the server's draws have no seed, and a random target may not end one of its turns
            generate_data(
                tmp_path / "self.jsonl", backend, tokenizer, num_conversations=3, **settings | {"prompts": None}
            )
            assert (tmp_path / "self.jsonl").stat().st_size
        except ValueError as error:
            assert "3 in; 0 done; " in str(error)
            assert sum(map(int, re.findall(r"(\d+) skipped: ", str(error)))) == 3  # each with its reason
        with pytest.raises(ValueError, match="404"):
            Server(f"http://127.0.0.1:{port}/wrong", retries=0)
    finally:
        server.terminate()
        server.wait()
