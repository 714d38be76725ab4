"""What training starts from: the teacher's signals, and its divergence.

All targets are tiny and random, built here; float32 on the CPU.
"""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from configuration_peagle import PEagleConfig
from data.collator import PackingCollator
from losses_peagle import Teacher, kl
from modeling_peagle import PEagleModel
from trainer_peagle import TargetSignals


VOCAB = 64
DRAFT_IDS = torch.arange(2, VOCAB, 4)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Windows shorter than the documents; a soft cap that bends these logits.
GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TARGETS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **GEMMA, final_logit_softcapping=1.5)),
    "gemma3 composite": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=SHAPE | GEMMA,
            vision_config=VISION | {"image_size": 8, "patch_size": 4},
            mm_tokens_per_image=4,
            image_token_id=60,
            boi_token_id=61,
            eoi_token_id=62,
        )
    ),
}


def build_target(name="llama", seed=0):
    torch.manual_seed(seed)
    return TARGETS[name]().eval().requires_grad_(False)


def build_config(target, draft_vocab_size=16):
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    return PEagleConfig.for_target(target, tokenizer, mask_token_id=1, draft_vocab_size=draft_vocab_size)


def packed(*documents):
    ids = [token for document in documents for token in document]
    blocks = [{"input_ids": ids, "loss_mask": [1] * len(ids), "seq_lengths": [*map(len, documents)]}]
    return PackingCollator(3, 1.0, 0.0)(blocks)


def random_documents(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 60, (length,), generator=generator).tolist() for length in lengths]


def alone(target, ids, layer_ids):
    """Features and next-token distribution of a document read by itself."""
    output = target(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[i] for i in layer_ids], dim=-1), output.logits[0].softmax(dim=-1)


@pytest.fixture(scope="module", params=TARGETS)
def packed_signals(request):
    target = build_target(request.param)
    config, documents = build_config(target), random_documents(11, 9)
    signals = TargetSignals(target, config, DRAFT_IDS, keep=False)
    return SimpleNamespace(target=target, config=config, documents=documents, row=packed(*documents), signals=signals)


def test_features_of_each_packed_document_are_those_of_the_document_alone(packed_signals):
    p, start = packed_signals, 0
    features, _ = p.signals(p.row)
    for ids in p.documents:
        expected, _ = alone(p.target, ids, p.config.eagle_aux_hidden_state_layer_ids)
        torch.testing.assert_close(features[:, start : start + len(ids)], expected, atol=1e-5, rtol=1e-5)
        start += len(ids)


def test_the_teacher_is_the_targets_distribution_restricted_to_the_draft_vocabulary(packed_signals):
    p, start = packed_signals, 0
    _, hidden = p.signals(p.row)
    for ids in p.documents:
        _, full = alone(p.target, ids, [0])
        expected = full[:, DRAFT_IDS] / full[:, DRAFT_IDS].sum(dim=-1, keepdim=True)
        teacher = p.signals.distribution(hidden[0, start : start + len(ids)])
        torch.testing.assert_close(teacher.probs, expected, atol=1e-5, rtol=1e-5)
        start += len(ids)


def test_the_soft_cap_of_gemma_is_part_of_the_teacher():
    target = build_target("gemma3")
    signals = TargetSignals(target, build_config(target), DRAFT_IDS, keep=False)
    hidden = 3 * torch.randn(5, 32)
    capped = signals.distribution(hidden).probs
    signals.softcap = None
    assert (signals.distribution(hidden).probs - capped).abs().max() > 0.05


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "call", [{}, {"use_cache": False, "attention_mask": torch.ones(1, 20)}], ids=["cache", "mask"]
)
def test_with_a_cache_or_a_mask_the_second_document_would_read_the_first(name, call):
    target = build_target(name)
    documents = random_documents(11, 9)
    row = packed(*documents)
    states = target(
        row["input_ids"], position_ids=row["position_ids"], output_hidden_states=True, **call
    ).hidden_states
    expected, _ = alone(target, documents[1], [2])
    assert (states[2][:, 11:] - expected).abs().max() > 0.1


def test_kl_is_zero_at_equality_and_only_there():
    torch.manual_seed(0)
    logits = 3 * torch.randn(20, 50)
    assert kl(logits + 5, Teacher.of(logits), None).abs().max() < 1e-5
    assert kl(logits.flip(1), Teacher.of(logits), None).min() > 0.1


# The choices


def test_a_draft_vocabulary_as_large_as_the_targets_is_the_full_one():
    target = build_target("llama")
    drafter = PEagleModel.from_target(target, build_config(target, VOCAB), torch.arange(VOCAB))
    assert drafter.draft_ids().tolist() == list(range(VOCAB))
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight)
