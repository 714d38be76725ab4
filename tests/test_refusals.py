"""What cannot be decoded exactly is refused by name, before anything is changed."""

import pytest
import torch
from conftest import SIZES, TARGETS, VOCAB, TinyTokenizer, drafted, make_drafter, make_target, plain, prompt_of
from peft import PromptTuningConfig, get_peft_model
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, StaticCache

from configuration_peagle import PEagleConfig
from modeling_peagle import PEagleModel


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_assistant_tokens": 9}, "trained for 1 to 8"),
        ({"use_cache": False}, "use_cache"),
        ({"num_beams": 2}, "num_beams"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states"),
        ({"stop_strings": ["x"]}, "tokenizer"),
        ({"prefill_chunk_size": 2}, "prefill_chunk_size"),
        ({"num_assistant_tokens": 0}, "is 0 in the call"),
        ({"num_assistant_tokens": 2.5}, "is 2.5"),
        ({"num_assistant_tokens": "4"}, "is '4'"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"dola_layers": "high"}, "dola"),
        ({"force_words_ids": [[7]], "num_beams": 2}, "num_beams"),
        ({"token_healing": True, "tokenizer": TinyTokenizer()}, "token_healing is set in the call"),
        ({"speculation_type": "dflash"}, "speculation_type"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"attention_mask": torch.zeros(1, 5, dtype=torch.long)}, "hides the whole prompt"),
    ],
)
def test_what_cannot_be_decoded_exactly_is_refused_by_name(llama, kwargs, message):
    with pytest.raises(ValueError, match=message):
        drafted(llama, make_drafter(llama), prompt_of(5), **kwargs)


def test_bad_prompts_are_refused(llama):
    drafter = make_drafter(llama)
    with pytest.raises(ValueError, match="limit is 512"):
        drafted(llama, drafter, prompt_of(513))
    with pytest.raises(ValueError, match="empty"):
        drafted(llama, drafter, torch.empty((1, 0), dtype=torch.long))
    with pytest.raises(ValueError, match="input_ids"):
        with drafter.attach(llama):
            llama.generate(inputs_embeds=torch.randn(1, 4, 32), assistant_model=drafter, max_new_tokens=4)


def test_an_unattached_drafter_says_so(llama):
    with pytest.raises(AttributeError, match="drafter.attach"):
        plain(llama, prompt_of(4), assistant_model=make_drafter(llama))


def test_a_cache_that_cannot_forget_is_refused_by_name():
    target = make_target("gemma3")
    with pytest.raises(ValueError, match="StaticCache"):
        drafted(target, make_drafter(target), prompt_of(4), cache_implementation="static")


def test_a_cache_is_refused_before_it_is_written_to():
    target = make_target("gemma3")
    cache = StaticCache(config=target.config, max_cache_len=40)
    with pytest.raises(ValueError, match="StaticCache"):
        drafted(target, make_drafter(target), prompt_of(4), cache=cache)
    assert cache.get_seq_length() == 0


def test_the_source_of_a_wrong_number_of_draft_tokens_is_named(llama):
    llama.generation_config.num_assistant_tokens = 30
    with make_drafter(llama).attach(llama) as target:
        drafter = target.generate.drafter
        with pytest.raises(ValueError, match="30 in the target's generation_config"):
            plain(llama, prompt_of(5), assistant_model=drafter)
        config = GenerationConfig(num_assistant_tokens=20)
        with pytest.raises(ValueError, match="20 in the generation_config"):
            plain(llama, prompt_of(5), assistant_model=drafter, generation_config=config)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_targets_whose_rope_changes_with_the_length_are_refused(rope_type):
    extra = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0} | (extra if rope_type == "longrope" else {})
    target = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=4, rope_parameters=rope)).eval()
    with pytest.raises(ValueError, match=rope_type):
        make_drafter(target).attach(target)


def test_one_rope_of_several_is_enough_to_refuse():
    target = make_target("gemma3")
    drafter = make_drafter(target)
    drafter.attach(target).detach()
    target.config.rope_parameters["full_attention"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="dynamic"):
        drafter.attach(target)


def test_a_mask_token_beyond_the_targets_rows_is_refused(llama):
    drafter = PEagleModel(
        PEagleConfig.for_target(llama, TinyTokenizer(), vocab_size=VOCAB + 30, mask_token_id=VOCAB + 3)
    )
    with pytest.raises(ValueError, match="mask_token_id is 104"):
        drafter.attach(llama)


def test_a_learned_prompt_is_refused(llama):
    drafter = make_drafter(llama)
    model = get_peft_model(llama, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with drafter.attach(model.get_base_model()), pytest.raises(ValueError, match="prompt tuning|inputs_embeds"):
        model.generate(input_ids=prompt_of(5), assistant_model=drafter, max_new_tokens=4)


def test_every_kind_of_target_is_covered():
    assert {"llama", "qwen3", "gemma3", "gemma3_composite"} <= TARGETS.keys()
