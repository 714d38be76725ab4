"""The drafter itself: slots, the attention rule, train/decode equality, checkpoints in the format that vLLM reads."""

import json
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, VOCAB, TinyTokenizer, make_drafter, prompt_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DynamicCache, LlamaConfig

import modeling_peagle
from configuration_peagle import PEagleConfig, default_layer_ids, tokenizer_fingerprint
from modeling_peagle import PEagleModel, fit_width, slot_layout, slot_visibility


DEPTHS = 4


def features_of(target, drafter, tokens):
    states = target(tokens[None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i] for i in drafter.config.eagle_aux_hidden_state_layer_ids], dim=-1)


def all_slots(tokens: int, depths: int = DEPTHS):
    """Every (anchor, depth) whose token exists, by depth."""
    pairs = [(a, d) for d in range(depths) for a in range(tokens - 1)]
    return torch.tensor([a for a, _ in pairs]), torch.tensor([d for _, d in pairs])


def training_logits(target, drafter, tokens, anchor, depth, visible=None):
    slot_ids, feature_index, positions = slot_layout(
        tokens, torch.arange(len(tokens)), anchor, depth, drafter.config.mask_token_id
    )
    if visible is None:
        visible = slot_visibility(anchor[:, None], depth[:, None], anchor, depth)
    output = drafter(
        slot_ids[None],
        features_of(target, drafter, tokens),
        feature_index[None],
        positions[None],
        visible[None],
        embedding=target.get_input_embeddings().weight,
    )
    return output.logits[0]


# Slots and what they see


def test_slot_layout_gives_tokens_features_and_positions():
    ids, positions = torch.tensor([10, 11, 12, 20, 21]), torch.tensor([0, 1, 2, 0, 1])
    anchor, depth = torch.tensor([0, 1, 3, 1, 1, 3]), torch.tensor([0, 0, 0, 1, 2, 1])
    slot_ids, feature_index, slot_positions = slot_layout(ids, positions, anchor, depth, mask_token_id=7)
    assert slot_ids.tolist() == [11, 12, 21, 7, 7, 7]
    assert feature_index.tolist() == [1, 2, 4, 0, 0, 0]
    assert slot_positions.tolist() == [0, 1, 0, 2, 3, 1]


def test_slot_visibility_is_the_real_prefix_and_the_own_chain():
    for a in range(4):
        for d in range(3):
            for b in range(4):
                for e in range(3):
                    prefix, chain = e == 0 and b <= a, b == a and e <= d
                    seen = slot_visibility(*map(torch.tensor, (a, d, b, e)))
                    assert bool(seen) == (prefix or chain)


@pytest.mark.parametrize("layers", range(1, 81))
def test_layer_ids_are_distinct_and_valid_for_every_depth(layers):
    ids = default_layer_ids(layers)
    assert ids == sorted(set(ids)) and 0 <= ids[0] and ids[-1] < layers
    assert len(ids) == min(3, layers)
    if layers >= 7:
        assert ids == [2, layers // 2, layers - 3]


# Training and decoding are the same function


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_training_forward_equals_the_decoding_forward_at_every_anchor_and_depth(target, num_layers):
    drafter, tokens = make_drafter(target, num_hidden_layers=num_layers), prompt_of(12)[0]
    anchor, depth = all_slots(len(tokens))
    trained = training_logits(target, drafter, tokens, anchor, depth)
    features, table = features_of(target, drafter, tokens), target.get_input_embeddings().weight
    cache = DynamicCache(config=drafter.config)
    for a in range(len(tokens) - 1):  # one verified token at a time, the way decoding meets them
        decoded = drafter.draft(tokens[a : a + 2], features[:, a : a + 1], DEPTHS, cache, table)
        assert cache.get_seq_length() == a + 1
        for d in range(DEPTHS):
            row = trained[(anchor == a) & (depth == d)][0]
            torch.testing.assert_close(decoded[d], row, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fault", ["positions", "chain", "mask_hidden"])
def test_a_faulty_training_forward_differs_from_decoding(llama, fault):
    drafter, tokens = make_drafter(llama), prompt_of(12)[0]
    anchor, depth = all_slots(len(tokens))
    features, table = features_of(llama, drafter, tokens), llama.get_input_embeddings().weight
    decoded = drafter.draft(tokens, features[:, :-1], DEPTHS, DynamicCache(config=drafter.config), table)
    visible = slot_visibility(anchor[:, None], depth[:, None], anchor, depth)
    if fault == "chain":  # slots see the mask slots of other anchors
        visible = anchor[None] <= anchor[:, None]
    if fault == "mask_hidden":
        drafter.mask_hidden.data.neg_()
    if fault == "positions":  # every slot of a chain at the anchor's own position
        slot_ids, feature_index, _ = slot_layout(tokens, torch.arange(12), anchor, depth, 5)
        slots = slot_ids[None], features, feature_index[None], anchor[None], visible[None]
        trained = drafter(*slots, embedding=table).logits[0]
    else:
        trained = training_logits(llama, drafter, tokens, anchor, depth, visible)
    last = trained[anchor == len(tokens) - 2]
    assert (last[1:] - decoded[1:]).abs().max() > 1e-4  # equality is tested to 1e-5


def test_a_prompt_read_at_once_equals_one_read_in_parts(llama):
    drafter, tokens = make_drafter(llama, num_hidden_layers=2), prompt_of(15)[0]
    features, table = features_of(llama, drafter, tokens), llama.get_input_embeddings().weight
    whole = drafter.draft(tokens, features[:, :14], DEPTHS, DynamicCache(config=drafter.config), table)
    cache, start = DynamicCache(config=drafter.config), 0
    for end in (3, 4, 9, 14):
        parts = drafter.draft(tokens[start : end + 1], features[:, start:end], DEPTHS, cache, table)
        start = end
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


def test_a_long_prompt_is_read_in_pieces(llama, monkeypatch):
    drafter, tokens = make_drafter(llama, num_hidden_layers=2), prompt_of(15)[0]
    arguments = tokens, features_of(llama, drafter, tokens)[:, :14], DEPTHS
    results = []
    for size in (1024, 14, 5, 1):
        monkeypatch.setattr(modeling_peagle, "MAX_SLOTS", size)
        cache, widest = DynamicCache(config=drafter.config), []
        hook = drafter.register_forward_pre_hook(lambda _, inputs: widest.append(inputs[0].shape[1]))  # noqa: B023
        results.append(drafter.draft(*arguments, cache, llama.get_input_embeddings().weight))
        hook.remove()
        assert cache.get_seq_length() == 14 and max(widest) <= min(size, 14) + DEPTHS - 1
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=1e-5)


def test_packed_documents_equal_separate_ones(llama):
    drafter, documents = make_drafter(llama, num_hidden_layers=2), [prompt_of(7)[0], prompt_of(11)[0]]
    separate = [training_logits(llama, drafter, tokens, *all_slots(len(tokens))) for tokens in documents]
    tokens, offsets = torch.cat(documents), [0, 7]
    parts = [all_slots(len(document)) for document in documents]
    anchor = torch.cat([a + offset for (a, _), offset in zip(parts, offsets)])
    depth = torch.cat([d for _, d in parts])
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    slot_ids, feature_index, slot_positions = slot_layout(tokens, positions, anchor, depth, 5)
    features = torch.cat([features_of(llama, drafter, document) for document in documents], dim=1)
    document = (anchor >= 7).long()
    rule = slot_visibility(anchor[:, None], depth[:, None], anchor, depth)
    for isolated in (True, False):
        visible = rule & (document[:, None] == document) if isolated else rule
        packed = drafter(
            slot_ids[None],
            features,
            feature_index[None],
            slot_positions[None],
            visible[None],
            embedding=llama.get_input_embeddings().weight,
        ).logits[0]
        error = (packed - torch.cat(separate)).abs().max()
        assert (error < 1e-5) == isolated


def test_eager_attention_equals_sdpa(llama):
    drafter, tokens = make_drafter(llama), prompt_of(9)[0]
    slots = all_slots(len(tokens))
    sdpa = training_logits(llama, drafter, tokens, *slots)
    drafter.set_attn_implementation("eager")
    torch.testing.assert_close(training_logits(llama, drafter, tokens, *slots), sdpa, atol=1e-5, rtol=1e-5)


def test_the_order_of_slots_does_not_matter(llama):
    drafter, tokens = make_drafter(llama), prompt_of(9)[0]
    anchor, depth = all_slots(len(tokens))
    order = torch.randperm(len(anchor))
    straight = training_logits(llama, drafter, tokens, anchor, depth)
    shuffled = training_logits(llama, drafter, tokens, anchor[order], depth[order])
    torch.testing.assert_close(shuffled, straight[order], atol=1e-5, rtol=1e-5)


# Borrowed and own parts


def test_head_rows_and_draft_ids_come_from_the_target(llama):
    ids = torch.tensor([2, 3, 11, 40, 77, 100])
    drafter = make_drafter(llama, draft_ids=ids)
    assert torch.equal(drafter.draft_ids(), ids)
    assert torch.equal(drafter.lm_head.weight, llama.lm_head.weight[ids])
    assert torch.equal(drafter.d2t + torch.arange(6), ids), "d2t holds offsets"


@pytest.mark.parametrize("width", [16, 32, 48])
def test_fitting_a_table_keeps_inner_products_as_well_as_the_width_allows(width):
    table = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    fitted = fit_width(table, width)
    assert fitted.shape == (50, width)
    gram, fitted_gram = table @ table.T, fitted @ fitted.T
    if width >= 32:
        torch.testing.assert_close(fitted_gram, gram, atol=1e-3, rtol=1e-4)
    else:  # the best approximation of this rank
        tail = torch.linalg.svdvals(table)[width:] ** 2
        assert torch.isclose((gram - fitted_gram).norm(), tail.norm(), rtol=1e-3)


def test_a_drafter_has_layers(llama):
    with pytest.raises(Exception, match="at least one layer"):  # wrapped by `@strict`
        make_drafter(llama, num_hidden_layers=0)


# Checkpoints


def vllm_table(config: PEagleConfig) -> dict:
    """Names and shapes that vLLM's EAGLE-3 loader takes, from its own table rather than from our modules."""
    h, heads, kv, d = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    aux, wide, mlp = len(config.eagle_aux_hidden_state_layer_ids), config.target_hidden_size, config.intermediate_size
    table = {"fc.weight": (h, aux * wide), "mask_hidden": (1, 1, aux * wide), "norm.weight": (h,)}
    table["lm_head.weight"] = (config.draft_vocab_size, h)
    table |= {f"fc_norm.{i}.weight": (wide,) for i in range(aux) if config.fc_norm}
    for i in range(config.num_hidden_layers):
        width = 2 * h if i == 0 else h
        table |= {
            f"layers.{i}.self_attn.q_proj.weight": (heads * d, width),
            f"layers.{i}.self_attn.k_proj.weight": (kv * d, width),
            f"layers.{i}.self_attn.v_proj.weight": (kv * d, width),
            f"layers.{i}.self_attn.o_proj.weight": (h, heads * d),
            f"layers.{i}.mlp.gate_proj.weight": (mlp, h),
            f"layers.{i}.mlp.up_proj.weight": (mlp, h),
            f"layers.{i}.mlp.down_proj.weight": (h, mlp),
            f"layers.{i}.input_layernorm.weight": (h,),
            f"layers.{i}.post_attention_layernorm.weight": (h,),
        }
    table["layers.0.hidden_norm.weight"] = (h,)
    if config.draft_vocab_size < config.vocab_size:
        table["d2t"] = (config.draft_vocab_size,)
    if config.own_embeddings:
        table["embed_tokens.weight"] = (config.vocab_size, h)
    return table


VARIANTS = {
    "plain": {},
    "deep": {"num_hidden_layers": 3},
    "pruned": {"draft_ids": torch.arange(2, 52, 2)},
    "own_embeddings": {"own_embeddings": True},
    "no_fc_norm": {"fc_norm": False},
    "wide": {"own_embeddings": True, "hidden_size": 64},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_drafter_holds_exactly_the_tensors_and_keys_that_vllm_reads(llama, tmp_path, variant):
    drafter = make_drafter(llama, **VARIANTS[variant])
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == vllm_table(drafter.config)
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
    drafter = make_drafter(llama)
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
    assert {"configuration_peagle.py", "modeling_peagle.py", "generation_peagle.py", "model.safetensors"} <= names
    assert json.loads((tmp_path / "c/config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]


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


def test_the_modules_do_not_reach_into_the_data_package():
    source = (ROOT / "modeling_peagle.py").read_text() + (ROOT / "generation_peagle.py").read_text()
    assert not re.search(r"^\s*(from|import) data\b", source, re.MULTILINE)


@torch.no_grad()
def test_a_drafter_of_the_targets_last_layer_says_what_the_target_says(llama):
    """Given what enters that layer, and no more: then slot a scores the token after a."""
    drafter = make_drafter(llama, eagle_aux_hidden_state_layer_ids=[3], fc_norm=False)
    drafter.take_layers(llama)
    drafter.fc.weight.copy_(torch.eye(32))
    prompt = prompt_of(12)
    output = llama(prompt, output_hidden_states=True)
    ids, anchor = prompt[0], torch.arange(11)
    slot_ids, index, positions = slot_layout(ids, torch.arange(12), anchor, torch.zeros_like(anchor), 5)
    visible = anchor[:, None] >= anchor
    table = llama.get_input_embeddings().weight
    logits = drafter(
        slot_ids[None], output.hidden_states[3], index[None], positions[None], visible[None], table
    ).logits
    torch.testing.assert_close(logits, output.logits[:, :11], atol=1e-4, rtol=1e-4)
    scratch = make_drafter(llama, eagle_aux_hidden_state_layer_ids=[3], fc_norm=False)
    scratch.fc.weight.copy_(torch.eye(32))
    other = scratch(slot_ids[None], output.hidden_states[3], index[None], positions[None], visible[None], table).logits
    assert (other - output.logits[:, :11]).abs().max() > 0.1


def test_every_target_gives_what_fits_of_its_layers(target):
    drafter = make_drafter(target, num_hidden_layers=2)
    drafter.take_layers(target)
    gate = target.get_decoder().layers[-1].mlp.gate_proj.weight
    assert torch.equal(drafter.layers[1].mlp.gate_proj.weight, gate)
    assert not drafter.layers[0].self_attn.q_proj.weight[:, :32].any()
    norm = target.get_decoder().norm
    expected = norm(torch.eye(32))
    torch.testing.assert_close(drafter.norm(torch.eye(32)), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="99 layers"):
        make_drafter(target, num_hidden_layers=99).take_layers(target)
