"""`drafter.attach(target)`: what it changes, what it leaves alone, and how it is undone."""

import copy
import pickle

import pytest
import torch
from conftest import ROOT, drafted, make_drafter, plain, prompt_of
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig


def test_attach_is_idempotent_and_a_context_manager_that_restores(llama):
    drafter, other = make_drafter(llama), make_drafter(llama, seed=1)
    assert "generate" not in vars(llama)
    with drafter.attach(llama):
        installed = llama.generate
        with drafter.attach(llama):
            assert llama.generate is installed
        assert llama.generate is installed
        with other.attach(llama):
            prompt = prompt_of(4)
            assert torch.equal(
                plain(llama, prompt, assistant_model=drafter), plain(llama, prompt, assistant_model=other)
            )
    assert "generate" not in vars(llama)


def test_attaching_brings_the_drafter_to_the_dtype_of_the_target(llama):
    drafter, prompt = make_drafter(llama).to(torch.float16), prompt_of(6)
    assert torch.equal(drafted(llama, drafter, prompt), plain(llama, prompt))
    assert drafter.dtype == torch.float32


def test_the_target_is_restored_after_an_error(llama):
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        drafted(llama, make_drafter(llama), prompt_of(4), num_assistant_tokens=99)
    assert "generate" not in vars(llama)


def test_positional_arguments_of_generate_are_understood(llama):
    prompt, config = prompt_of(4), GenerationConfig(max_new_tokens=5, do_sample=False)
    drafter = make_drafter(llama)
    with drafter.attach(llama):
        arguments = (prompt, config, None, None, None, None, drafter)
        assert torch.equal(llama.generate(*arguments), plain(llama, prompt, max_new_tokens=5))


def test_plain_generation_of_an_attached_target_is_untouched(llama):
    prompt = prompt_of(4)
    expected = plain(llama, prompt, num_beams=2)
    make_drafter(llama).attach(llama)
    assert torch.equal(plain(llama, prompt, num_beams=2), expected)


def test_attachments_may_be_undone_in_any_order(llama):
    drafter, other, prompt = make_drafter(llama), make_drafter(llama, seed=1), prompt_of(4)
    expected = plain(llama, prompt)
    first, second = drafter.attach(llama), other.attach(llama)
    first.detach()
    assert torch.equal(plain(llama, prompt, assistant_model=other), expected)
    with pytest.raises(AttributeError, match="drafter.attach"):
        plain(llama, prompt, assistant_model=drafter)
    second.detach()
    assert "generate" not in vars(llama)


def test_the_last_attachment_restores_the_target(llama):
    drafter, prompt = make_drafter(llama), prompt_of(4)
    first, second = drafter.attach(llama), drafter.attach(llama)
    first.detach()
    first.detach()  # once is enough
    plain(llama, prompt, assistant_model=drafter)
    second.detach()
    assert "generate" not in vars(llama)


def test_a_wrapper_of_the_user_goes_on_seeing_every_call(llama):
    drafter, prompt, seen = make_drafter(llama), prompt_of(4), []

    def wrapper(*args, **kwargs):
        seen.append(kwargs.get("max_new_tokens"))
        return type(llama).generate(llama, *args, **kwargs | {"max_new_tokens": 3})

    llama.generate = wrapper
    with drafter.attach(llama):
        assert plain(llama, prompt).shape[1] == plain(llama, prompt, assistant_model=drafter).shape[1] == 7
    assert seen == [24, 24] and llama.generate is wrapper


def test_an_argument_given_twice_is_refused(llama):
    prompt = prompt_of(4)
    with make_drafter(llama).attach(llama), pytest.raises(TypeError, match="multiple values"):
        llama.generate(prompt, inputs=prompt)


def test_a_deep_copy_of_an_attached_target_decodes_with_its_own_weights(llama):
    drafter, prompt = make_drafter(llama), prompt_of(6)
    before = plain(llama, prompt)
    with drafter.attach(llama):
        twin = copy.deepcopy(llama)
    for parameter in twin.parameters():
        parameter.data.mul_(-1)
    expected = type(twin).generate(twin, prompt, do_sample=False, max_new_tokens=24)
    assert not torch.equal(expected, before)
    assert torch.equal(plain(twin, prompt, assistant_model=drafter), expected)
    assert torch.equal(plain(twin, prompt), expected)
    assert "generate" not in vars(llama)


def test_an_attached_target_is_saved_but_not_pickled(llama, tmp_path):
    with make_drafter(llama).attach(llama):
        llama.save_pretrained(tmp_path)
        with pytest.raises(TypeError, match="detach it first"):
            pickle.dumps(llama)
    assert (tmp_path / "model.safetensors").is_file()


def test_an_attached_target_takes_custom_generate_as_well(llama):
    drafter, prompt = make_drafter(llama), prompt_of(5)
    custom = {"custom_generate": str(ROOT), "trust_remote_code": True, "return_dict_in_generate": True}
    out = drafted(llama, drafter, prompt, **custom)
    assert torch.equal(out.sequences, plain(llama, prompt)) and out.stats.drafted
    assert torch.equal(drafted(llama, drafter, prompt, custom_generate=None), plain(llama, prompt))


def test_a_drafter_in_training_mode_is_put_into_evaluation_mode(llama):
    drafter, prompt = make_drafter(llama, attention_dropout=0.5).train(), prompt_of(5)
    options = {"do_sample": True, "top_k": 0}
    torch.manual_seed(0)
    expected = plain(llama, prompt, **options)
    torch.manual_seed(0)
    assert torch.equal(drafted(llama, drafter, prompt, draft_tree=[(0,), (0, 0)], **options), expected)
    assert not drafter.training


def test_a_peft_model_is_attached_by_its_base_model(llama):
    drafter, prompt = make_drafter(llama), prompt_of(5)
    model = get_peft_model(llama, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    with pytest.raises(TypeError, match="get_base_model"):
        drafter.attach(model)
    expected = model.generate(prompt, do_sample=False, max_new_tokens=12)
    with drafter.attach(model.get_base_model()):
        out = model.generate(prompt, assistant_model=drafter, do_sample=False, max_new_tokens=12)
    assert torch.equal(out, expected)
