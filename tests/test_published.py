"""EAGLE-3 and P-EAGLE checkpoints in the formats in which others publish them load into ours, and draft the same."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import SIZES, VOCAB, drafted, make_target, plain, prompt_of
from safetensors.torch import load_file, save_file
from test_model import features_of
from test_sequential import make_sequential
from transformers import DynamicCache

from inference_peagle import load_drafter
from modeling_peagle import PEagleModel


DRAFT_IDS = torch.arange(3, 63, 2)
# What a Llama configuration says of the layers, with the RoPE fields of older versions.
LAYERS = {
    **{
        name: SIZES[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    },
    **{
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    },
    **{"model_type": "llama", "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False},
    **{"attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": True},
}


def speculators(kind, layers, tokens, **fields):
    """A `config.json` of the speculators library."""
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": [{"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}[kind]],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": len(DRAFT_IDS),
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "embed_requires_grad": False,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "org/target"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": LAYERS | {"num_hidden_layers": layers},
        "transformers_version": "4.57.0",
    } | fields


PLAIN = LAYERS | {"torch_dtype": "float32", "transformers_version": "4.36.2"}
# The config.json, the fields of ours that it should come to, and the tensors that are there or not.
FORMATS = {
    "EAGLE-3": (
        PLAIN
        | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(DRAFT_IDS)},
        {"parallel_drafting": False, "fc_norm": False, "draft_ids": DRAFT_IDS},
        {"midlayer": True, "t2d": True},
    ),
    "EAGLE-3, SafeAILab": (
        PLAIN
        | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "draft_vocab_size": len(DRAFT_IDS)}
        | {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": []}},
        {"parallel_drafting": False, "fc_norm": False, "draft_ids": DRAFT_IDS},
        {"midlayer": True, "t2d": True},
    ),
    "EAGLE-3, own embeddings": (
        PLAIN
        | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": VOCAB}
        | {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
        {"parallel_drafting": False, "fc_norm": False, "own_embeddings": True}
        | {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
        {"midlayer": True, "t2d": True, "d2t": True},
    ),
    "EAGLE-3, speculators": (
        speculators("eagle3", 1, 3, norm_before_residual=True, norm_before_fc=True),
        {"parallel_drafting": False, "fc_norm": False, "draft_ids": DRAFT_IDS, "own_embeddings": True}
        | {"norm_before_residual": True, "norm_before_fc": True, "num_depths": 3, "speculation_depth": 3},
        {"t2d": True},
    ),
    "EAGLE-3.1, speculators": (
        speculators("eagle3", 1, 5, fc_norm=True, norm_output=True, norm_before_fc=False)
        | {"speculators_config": {"proposal_methods": [{"proposal_type": "greedy"}], "verifier": None}},
        {"parallel_drafting": False, "norm_output": True, "draft_ids": DRAFT_IDS},
        {"t2d": True},
    ),
    "P-EAGLE": (
        PLAIN
        | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 3}
        | {"ptd_token_id": 5, "parallel_drafting": True},
        {"fc_norm": False, "num_hidden_layers": 3, "own_embeddings": True},
        {"midlayer": True, "t2d": True, "d2t": True},
    ),
    "P-EAGLE, speculators": (
        speculators("peagle", 2, 6, mask_token_id=5, fc_norm=False, norm_output=False),
        {"fc_norm": False, "draft_ids": DRAFT_IDS, "num_hidden_layers": 2, "num_depths": 6, "own_embeddings": True},
        {},
    ),
}


def publish(folder, drafter, config, *, midlayer=False, t2d=False, d2t=False):
    """What `drafter` holds, under the names of the format."""
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    if midlayer:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if t2d:
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, drafter.draft_ids(), True)
    if d2t:
        tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.long)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def published(llama, tmp_path, request):
    """The drafter that is published in the format of the test, and the folder."""
    config, fields, tensors = FORMATS[request.param]
    if not fields.get("parallel_drafting", True):
        drafter = make_sequential(llama, **{"speculation_depth": 4} | fields)
    else:
        drafter = make_sequential(llama, **{"parallel_drafting": True} | fields)
    publish(tmp_path, drafter, config, **tensors)
    return drafter, tmp_path


@pytest.mark.parametrize("published", FORMATS, indirect=True)
@torch.no_grad()
def test_it_drafts_what_it_was_published_to_draft(llama, published):
    drafter, folder = published
    prompt, table = prompt_of(9), llama.get_input_embeddings().weight
    loaded = load_drafter(folder)
    out = drafted(llama, loaded, prompt, num_assistant_tokens=3)  # attaching tells the layers that the config may not
    assert torch.equal(out, plain(llama, prompt))
    ids = drafter.config.eagle_aux_hidden_state_layer_ids
    assert loaded.config.eagle_aux_hidden_state_layer_ids == ids
    assert loaded.config.own_embeddings is drafter.config.own_embeddings
    assert loaded.config.parallel_drafting is drafter.config.parallel_drafting
    assert torch.equal(loaded.draft_ids(), drafter.draft_ids())
    features = features_of(llama, drafter, prompt[0])[:, :8]
    one, other = (each.draft(prompt[0], features, 3, DynamicCache(), table) for each in (drafter, loaded))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)

    # Saved again, it is one of ours.
    loaded.save_pretrained(folder / "ours")
    again = PEagleModel.from_pretrained(folder / "ours")
    assert again.config.to_json_string() == loaded.config.to_json_string()
    torch.testing.assert_close(again.draft(prompt[0], features, 3, DynamicCache(), table), other)
    said = json.loads((folder / "ours/config.json").read_text())
    assert (
        said["architectures"] == ["LlamaForCausalLMEagle3"] and said["own_embeddings"] is loaded.config.own_embeddings
    )
    assert not any("midlayer" in name for name in load_file(folder / "ours/model.safetensors"))


@pytest.mark.parametrize("published", ["EAGLE-3", "EAGLE-3, speculators"], indirect=True)
@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output", "norm_before_fc"])
def test_a_flag_that_is_lost_is_seen(llama, published, flag):
    drafter, folder = published
    loaded, prompt = load_drafter(folder), prompt_of(9)
    features, table = features_of(llama, drafter, prompt[0])[:, :8], llama.get_input_embeddings().weight
    if flag == "norm_before_fc":
        normed = drafter.config.norm_before_fc
        drafter.fuse = lambda features: drafter.fc(features if normed else F.rms_norm(features, features.shape[-1:]))
    elif flag == "norm_output":
        drafter.config.norm_output ^= True
    else:
        drafter.layers[0].norm_before_residual ^= True
    one, other = (each.draft(prompt[0], features, 3, DynamicCache(), table) for each in (drafter, loaded))
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("published", ["EAGLE-3"], indirect=True)
def test_the_layers_are_those_of_the_first_target_if_none_are_named(published):
    _, folder = published
    loaded = load_drafter(folder)
    assert loaded.config.eagle_aux_hidden_state_layer_ids is None
    loaded.attach(make_target("llama")).detach()
    assert loaded.config.eagle_aux_hidden_state_layer_ids == [1, 2, 3]


@pytest.mark.parametrize("published", ["EAGLE-3"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "kind 'qwen3'"),
        ({"speculators_model_type": "dflash"}, "none of EAGLE-3 or P-EAGLE"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "none of EAGLE-3 or P-EAGLE"),
        ({"mask_token_id": 5}, "missing tensors: mask_hidden"),
        ({"num_hidden_layers": 2}, "missing tensors: layers.1"),
        ({"norm_before_fc": True}, "missing tensors: input_norm"),
    ],
)
def test_what_cannot_be_loaded_is_refused(published, change, message):
    _, folder = published
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises((ValueError, OSError), match=message):
        load_drafter(folder)


def first_with(change):
    """Changes the first tensor that is no map of the vocabulary."""

    def apply(tensors):
        name = min(tensors.keys() - {"d2t", "t2d"})
        tensors[name] = change(tensors[name])

    return apply


def with_t2d_of_another(tensors):
    tensors["t2d"] = tensors["t2d"].roll(1)


def with_a_layer_twice(tensors):
    tensors |= {name.replace("midlayer.", "layers.0."): tensor * 2 for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("published", "damage", "message"),
    [
        ("EAGLE-3", with_a_layer_twice, "twice, under two names: layers.0.hidden_norm.weight"),
        (
            "EAGLE-3",
            lambda tensors: tensors.update({"peagle.fc.weight": tensors["fc.weight"] + 1}),
            "peagle.fc.weight",
        ),
        ("EAGLE-3", first_with(lambda tensor: tensor.to(torch.int8)), r"no floating-point numbers: .*\(I8\)"),
        ("EAGLE-3", first_with(lambda tensor: tensor.bool()), r"no floating-point numbers: .*\(BOOL\)"),
        ("EAGLE-3", first_with(lambda tensor: tensor * float("nan")), "holds NaN or inf"),
        ("EAGLE-3", lambda tensors: tensors.update(d2t=tensors["d2t"].float()), "d2t holds torch.float32"),
        ("EAGLE-3", lambda tensors: tensors.update(d2t=tensors["d2t"].bool()), "d2t"),
        ("EAGLE-3", with_t2d_of_another, "t2d and d2t tell different"),
        ("EAGLE-3, own embeddings", lambda tensors: tensors["d2t"].fill_(1), "d2t gives other tokens"),
        ("EAGLE-3, own embeddings", lambda tensors: tensors["t2d"].fill_(False), "t2d and d2t tell different"),
    ],
    indirect=["published"],
)
def test_weights_that_would_be_read_otherwise_than_meant_are_refused(published, damage, message):
    _, folder = published
    load_drafter(folder)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match=message):
        load_drafter(folder)


@pytest.mark.parametrize("published", ["EAGLE-3, speculators"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [
        {"speculators_config": ["x"]},
        {"transformer_layer_config": None},
        {"draft_vocab_size": "many"},
        {"target_hidden_size": 10**12},
        [],
        None,
    ],
    ids=str,
)
def test_a_damaged_configuration_is_refused_in_words(published, change):
    _, folder = published
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change if isinstance(change, dict) else change))
    with pytest.raises(ValueError, match="(?s)drafter .*(copy|download)"):
        load_drafter(folder)


@pytest.mark.parametrize("published", ["EAGLE-3"], indirect=True)
def test_a_pointer_in_place_of_weights_is_refused_in_words(published):
    _, folder = published
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match="drafter .* cannot be loaded .*download"):
        load_drafter(folder)


@pytest.mark.parametrize("published", ["EAGLE-3, SafeAILab"], indirect=True)
def test_a_null_says_nothing(published):
    _, folder = published
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"]["use_aux_hidden_state"] = None
    (folder / "config.json").write_text(json.dumps(config))
    load_drafter(folder)
