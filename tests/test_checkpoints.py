"""Checkpoints of a drafter: what vLLM and AutoModel read in them, and what is refused with its cause."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, VOCAB, TinyTokenizer, make_drafter, prompt_of
from safetensors.torch import load_file, save_file
from test_model import all_slots, training_logits
from transformers import AutoConfig, LlamaConfig
from vllm_rules import vllm_table

from configuration_peagle import PEagleConfig, tokenizer_fingerprint
from modeling_peagle import PEagleModel


def tensors_of(config: PEagleConfig) -> dict:
    """Names and shapes of what a drafter's file should hold: all that vLLM has a place for, but for what is borrowed."""
    table = vllm_table(config.to_dict())
    return {name: shape for name, shape in table.items() if name != "embed_tokens.weight" or config.own_embeddings}


VARIANTS = {
    "plain": {},
    "deep": {"num_hidden_layers": 3},
    "pruned": {"draft_ids": torch.arange(2, 52, 2)},
    "own_embeddings": {"own_embeddings": True},
    "no_fc_norm": {"fc_norm": False},
    "markov": {"markov_rank": 4, "draft_ids": torch.arange(2, 52, 2)},
    "wide": {"own_embeddings": True, "hidden_size": 64},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_drafter_holds_exactly_the_tensors_and_keys_that_vllm_reads(llama, tmp_path, variant):
    drafter = make_drafter(llama, **VARIANTS[variant])
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == tensors_of(drafter.config)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "parallel_drafting": True,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
        "fc_norm": drafter.config.fc_norm,
        "draft_vocab_size": drafter.config.draft_vocab_size,
        "target_hidden_size": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "mask_token_id": 5,
        "pard_token": 5,
        "ptd_token_id": 5,
        "max_position_embeddings": 512,
        "auto_map": {"AutoConfig": "configuration_peagle.PEagleConfig", "AutoModel": "modeling_peagle.PEagleModel"},
    }
    assert {key: config[key] for key in expected} == expected
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_without_our_code_the_config_is_a_llama_config_with_the_keys(llama, tmp_path):
    make_drafter(llama).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert type(config) is LlamaConfig
    assert config.pard_token == 5 and config.parallel_drafting and config.eagle_aux_hidden_state_layer_ids == [1, 2, 3]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_reloaded_drafter_drafts_the_same(llama, tmp_path, variant):
    drafter, tokens = make_drafter(llama, num_depths=6, **VARIANTS[variant]), prompt_of(9)[0]
    drafter.mask_hidden.data.normal_()
    drafter.save_pretrained(tmp_path)
    again = PEagleModel.from_pretrained(tmp_path)
    assert again.config.to_json_string() == drafter.config.to_json_string()
    slots = all_slots(len(tokens))
    assert torch.equal(training_logits(llama, again, tokens, *slots), training_logits(llama, drafter, tokens, *slots))


CLEAN_LOAD = """
import sys, torch
from transformers import AutoConfig, AutoModel
drafter = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(drafter).__name__ == "PEagleModel" and type(config).__name__ == "PEagleConfig"
assert not drafter.can_generate()
drafter.save_pretrained(sys.argv[2])
print(sum(p.double().sum().item() for p in drafter.parameters()), callable(drafter.attach))
"""


def test_a_saved_folder_loads_with_auto_model_in_a_clean_process_and_saves_itself_whole(llama, tmp_path):
    drafter = make_drafter(llama, markov_rank=4)
    torch.nn.init.normal_(drafter.markov_head.next.weight)
    drafter.save_pretrained(tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    for source, copy in (("a", "b"), ("b", "c")):
        run = subprocess.run(
            [sys.executable, "-c", CLEAN_LOAD, tmp_path / source, tmp_path / copy],
            cwd=tmp_path / "elsewhere",
            env={
                "HF_HUB_OFFLINE": "1",
                "HF_MODULES_CACHE": str(tmp_path / "modules"),
                "PATH": "",
                "HOME": str(tmp_path),
            },
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        total = sum(p.double().sum().item() for p in drafter.parameters())
        assert run.stdout.split() == [str(total), "True"]
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert {
        "configuration_peagle.py",
        "modeling_peagle.py",
        "batch_peagle.py",
        "decoding_peagle.py",
        "generation_peagle.py",
        "model.safetensors",
    } <= names
    assert json.loads((tmp_path / "c/config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]


def test_a_markov_head_is_kept_apart_and_comes_back(llama, tmp_path):
    drafter = make_drafter(llama, markov_rank=4)
    torch.nn.init.normal_(drafter.markov_head.next.weight)
    drafter.save_pretrained(tmp_path / "finished")
    drafter.save_pretrained(tmp_path / "checkpoint", state_dict=drafter.state_dict())  # as the Trainer does
    assert (tmp_path / "finished/markov_head/model.safetensors").exists()
    assert not (tmp_path / "checkpoint/markov_head").exists()
    for folder in ("finished", "checkpoint"):
        again = PEagleModel.from_pretrained(tmp_path / folder)
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    (tmp_path / "finished/markov_head/model.safetensors").write_bytes(b"broken")
    with pytest.raises(OSError, match="The Markov head that config.json of .* names cannot be read"):
        PEagleModel.from_pretrained(tmp_path / "finished")
    (tmp_path / "finished/markov_head/model.safetensors").unlink()
    with pytest.raises(OSError, match="The Markov head that config.json of .* names cannot be read"):
        PEagleModel.from_pretrained(tmp_path / "finished")


def test_custom_generate_of_the_repository_decodes_without_attaching(llama):
    prompt, drafter = prompt_of(6), make_drafter(llama)
    options = {"max_new_tokens": 12, "do_sample": False}
    shim = {"custom_generate": str(ROOT), "trust_remote_code": True}
    out = llama.generate(prompt, assistant_model=drafter, return_dict_in_generate=True, **shim, **options)
    assert torch.equal(out.sequences, llama.generate(prompt, **options)) and out.stats.emitted
    with pytest.raises(ValueError, match="assistant_model"):
        llama.generate(prompt, **shim, **options)


# Bad input


def test_damaged_checkpoints_are_refused_with_the_cause(llama, tmp_path):
    drafter = make_drafter(llama, draft_ids=torch.arange(50))
    drafter.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}  # not mapped: the file is rewritten

    def write(tensors):
        file.unlink()
        save_file(tensors, file, metadata={"format": "pt"})

    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match="truncated"):
        PEagleModel.from_pretrained(tmp_path)
    for missing in ("mask_hidden", "d2t"):
        write({name: t for name, t in tensors.items() if name != missing})
        with pytest.raises(OSError, match=f"missing tensors: {missing}"):
            PEagleModel.from_pretrained(tmp_path)
    for offsets in (-2 * torch.arange(50), torch.full((50,), -1), torch.full((50,), VOCAB)):
        write(tensors | {"d2t": offsets})
        with pytest.raises(OSError, match="d2t in .* is damaged"):
            PEagleModel.from_pretrained(tmp_path)
    write(tensors | {"layers.7.what": torch.zeros(2)})
    with pytest.raises(OSError, match="unknown tensors: layers.7.what"):
        PEagleModel.from_pretrained(tmp_path)
    write(tensors | {"fc.weight": torch.zeros(3, 3)})
    with pytest.raises(OSError, match="misshapen tensors: fc.weight"):
        PEagleModel.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        PEagleModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculation_depth": 9}, "num_depths"),
        ({"mask_token_id": VOCAB}, "mask_token_id"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}, "distinct"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "beyond a target of 4 layers"),
        ({"hidden_size": 16}, "own_embeddings"),
    ],
)
def test_a_contradictory_configuration_is_refused(llama, change, message):
    with pytest.raises(Exception, match=message):
        PEagleConfig.for_target(llama, TinyTokenizer(), **{"mask_token_id": 5} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_hidden_size": 64, "hidden_size": 64}, "hidden size 64, but this target's is 32"),
        ({"target_num_hidden_layers": 6}, "6 layers, but this target has 4"),
        ({"vocab_size": 5000}, "vocabulary of 5000"),
    ],
)
def test_a_drafter_of_another_target_is_refused(llama, change, message):
    config = PEagleConfig.for_target(
        llama, TinyTokenizer(), mask_token_id=5, target_name_or_path="org/other", **change
    )
    with pytest.raises(ValueError, match=f"org/other.*{message}"):
        PEagleModel(config).attach(llama)
    assert "generate" not in vars(llama)


def test_another_tokenizer_is_refused(llama):
    class Other:
        def get_vocab(self):
            return {f"token{i}": (i + 1) % VOCAB for i in range(VOCAB)}

    drafter = make_drafter(llama)
    assert tokenizer_fingerprint(Other()) != tokenizer_fingerprint(TinyTokenizer())
    with pytest.raises(ValueError, match="another meaning"):
        drafter.attach(llama, Other())
    drafter.attach(llama, TinyTokenizer()).detach()


def test_what_cannot_generate_is_refused(llama):
    with pytest.raises(TypeError, match="causal language model"):
        make_drafter(llama).attach(llama.model)
