"""Targets, trees and settings with which trees would go wrong are refused by name, before anything is written."""

import pytest
import torch
from conftest import (
    SIZES,
    VOCAB,
    Recorder,
    drafted,
    make_drafter,
    make_target,
    plain,
    prompt_of,
    sharpened,
)
from transformers import (
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
)

import decoding_peagle
import verification_peagle
from configuration_peagle import PEagleConfig
from modeling_peagle import PEagleModel
from tree_peagle import DraftTree


TOKENS = {"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}


def make_other(build):
    """A target of another family, with a drafter configured by hand."""
    target = sharpened(build)
    width = {"hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    ids = {"vocab_size": VOCAB, "mask_token_id": 5, "eagle_aux_hidden_state_layer_ids": [1, 2]}
    return target, PEagleModel(PEagleConfig(**width, **heads, **ids, target_num_hidden_layers=4)).eval()


def gpt_neo():
    layers = {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8}
    return GPTNeoForCausalLM(
        GPTNeoConfig(**TOKENS, **layers, hidden_size=32, num_heads=4, max_position_embeddings=128)
    )


def bart():
    heads = {"decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_layers": 4, "encoder_layers": 4}
    kind = {"is_decoder": True, "is_encoder_decoder": False, "forced_eos_token_id": None}
    return BartForCausalLM(
        BartConfig(**TOKENS, **heads, **kind, d_model=32, decoder_ffn_dim=32, max_position_embeddings=128)
    )


def bloom():
    return BloomForCausalLM(BloomConfig(**TOKENS, hidden_size=32, n_layer=4, n_head=4))


class RightAndWrong:
    """In the place of `propose`: trees whose right continuation hangs beside wrong nodes."""

    def __init__(self, monkeypatch, reference):
        monkeypatch.setattr(decoding_peagle, "propose", self)
        start = decoding_peagle.Continuation.__init__

        def watched(text, *args):
            start(text, *args)
            self.text = text

        monkeypatch.setattr(decoding_peagle.Continuation, "__init__", watched)
        self.reference = reference

    def __call__(self, drafter, logits, *_):
        tokens, parents, parent = [], [], 0
        for token in self.reference[self.text.length :][: len(logits)]:
            tokens += [(token + 1) % VOCAB, (token + 2) % VOCAB, token]
            parents += [parent] * 3
            parent = len(tokens)
        return DraftTree(tokens, parents, [0.0] * len(tokens))


@pytest.mark.parametrize("build", [gpt_neo, bart, bloom])
def test_targets_that_know_no_positions_or_masks_of_single_rows_are_refused_before_anything_is_written(
    monkeypatch, build
):
    """GPT-Neo looks a row's window up by its number, Bart counts positions itself: trees gave other tokens silently."""
    target, drafter = make_other(build)
    prompt = prompt_of(20)
    expected = plain(target, prompt)
    RightAndWrong(monkeypatch, plain(target, prompt, max_new_tokens=40)[0].tolist())
    recorder = Recorder()
    with pytest.raises(ValueError, match="cannot verify a tree"):
        drafted(target, drafter, prompt, draft_tree=12, streamer=recorder)
    assert len(recorder.tokens) == 20
    monkeypatch.undo()
    assert torch.equal(drafted(target, drafter, prompt), expected)


@pytest.mark.parametrize("shape", [{"draft_tree": 6}, {"prompt_lookup_num_tokens": 4}], ids=str)
def test_attention_that_takes_no_mask_is_refused_before_anything_is_read(shape):
    target, recorder = make_target("llama"), Recorder()
    target.config._attn_implementation = "flash_attention_2"  # the kernel need not be there for that
    with pytest.raises(ValueError, match="'flash_attention_2' of this target cannot verify a tree"):
        drafted(target, make_drafter(target), prompt_of(4), streamer=recorder, **shape)
    assert len(recorder.tokens) <= 4


def deepseek_v32():
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    index = {"index_topk": 6, "index_head_dim": 8, "index_n_heads": 2}
    return DeepseekV32ForCausalLM(
        DeepseekV32Config(**sizes, **ranks, **experts, **index, num_experts_per_tok=2, num_hidden_layers=4)
    )


def test_sparse_attention_with_an_indexer_is_refused():
    """Both chains and trees gave other tokens silently; of a tree the indexer's keys stayed where they were."""
    target, drafter = make_other(deepseek_v32)
    for shape in (None, 6):
        with pytest.raises(ValueError, match="indexer"):
            drafted(target, drafter, prompt_of(5), draft_tree=shape)
    with pytest.raises(ValueError, match="DynamicIndexedLayer"):
        verification_peagle.check_cache(DynamicCache(config=target.config))


@pytest.mark.parametrize(
    "shape", [[(200,)], [(0,), (0,)], [()], [(0.5,)], [0, 1], ["a"], [(-1,)], [(True,)], [(0,), (0, 0, 0)]], ids=str
)
def test_impossible_static_trees_are_refused_before_a_token_is_streamed(shape):
    target, recorder = make_target("llama"), Recorder()
    for limit in (1, 24):
        with pytest.raises(ValueError, match="draft_tree"):
            drafted(
                target, make_drafter(target), prompt_of(4), draft_tree=shape, streamer=recorder, max_new_tokens=limit
            )
    assert recorder.tokens == []


def test_a_static_tree_wider_than_the_draft_vocabulary_is_refused_beforehand():
    target = make_target("llama")
    drafter = make_drafter(target, draft_ids=torch.tensor([3, 9]))
    with pytest.raises(ValueError, match="from 0 to 1"):
        drafted(target, drafter, prompt_of(4), draft_tree=[(0,), (1,), (2,)])


@pytest.mark.parametrize("lookup", [-1, 2.5, "3", True, [4]])
def test_impossible_lengths_of_the_prompt_lookup_are_refused(lookup):
    target = make_target("llama")
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens is .* in the call"):
        drafted(target, make_drafter(target), prompt_of(4), prompt_lookup_num_tokens=lookup)


@pytest.mark.parametrize("options", [{}, {"draft_tree": 9}, {"prompt_lookup_num_tokens": 20}], ids=str)
def test_drafts_do_not_reach_beyond_learned_positions(options):
    """The text ends at its EOS within the table; drafts behind it must not be looked up beyond its end."""
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32}
    target, drafter = make_other(lambda: GPT2LMHeadModel(GPT2Config(**TOKENS, **sizes)))
    prompt = torch.cat([prompt_of(13), prompt_of(13)], dim=1)
    reference = plain(target, prompt, max_new_tokens=5)[0].tolist()
    options = {"max_new_tokens": 60, "num_assistant_tokens": 8} | options
    out = drafted(target, drafter, prompt, eos_token_id=reference[29], **options)
    assert out[0].tolist() == reference[: out.shape[1]] and out[0, -1] == reference[29]
    # A table that is used up to its last row, and by plain decoding, too.
    full = {"max_new_tokens": 7} | {name: value for name, value in options.items() if name != "max_new_tokens"}
    assert torch.equal(drafted(target, drafter, prompt, **full), plain(target, prompt, max_new_tokens=7))


@pytest.mark.parametrize("options", [{"draft_tree": 5}, {"draft_tree": [(0,), (1,)]}, {"draft_tree": "auto"}])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_drafter_that_overflowed_drafts_nothing(monkeypatch, value, options):
    target, prompt = make_target("llama"), prompt_of(5)
    monkeypatch.setattr(PEagleModel, "head", lambda self, hidden: torch.full((*hidden.shape[:-1], VOCAB), value))
    out = drafted(target, make_drafter(target), prompt, max_new_tokens=9, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, plain(target, prompt, max_new_tokens=9)) and sum(out.stats.nodes) == 0
