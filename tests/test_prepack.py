"""Prepacked linear layers: the same model, bit for bit independent of the number of rows, and stock again afterwards."""

import copy
import io

import pytest
import torch
from conftest import make_drafter, make_target, prompt_of
from test_generation import PATTERNS, drafted, plain, scripted_for
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoModelForCausalLM

from prepack_peagle import packed_forward, prepack


ROWS = [1, 2, 3, 5, 8, 9, 16, 33, 100]


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def prepared(model):
    """The layers of `model` whose forward is the packed one."""
    return [layer for layer in model.modules() if getattr(vars(layer).get("forward"), "func", None) is packed_forward]


def packs(model):
    return [vars(linear)["forward"].args[1] for linear in prepared(model)]


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(32, 48).requires_grad_(False)


# One layer


@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (1, 5), (2, 3), (2, 3, 4), ()])
@pytest.mark.parametrize("bias", [True, False])
def test_every_shape_gives_the_stock_result(shape, bias):
    linear, x = nn.Linear(32, 48, bias=bias).requires_grad_(False), torch.randn(*shape, 32)
    stock = linear(x)
    with prepack(linear):
        result = linear(input=x)
    assert result.shape == stock.shape and result.stride() == stock.stride()
    torch.testing.assert_close(result, stock, atol=1e-5, rtol=1e-5)


def test_views_give_the_stock_result(linear):
    with prepack(linear):
        for x in (
            torch.randn(32, 5).T,
            torch.randn(5, 64)[:, ::2],
            torch.randn(2, 9, 32)[:, 3:5],
            torch.ones(32).expand(4, 32),
        ):
            torch.testing.assert_close(
                linear(x), nn.functional.linear(x, linear.weight, linear.bias), atol=1e-5, rtol=1e-5
            )
        with pytest.raises(RuntimeError):
            linear(torch.randn(5, 33))


@pytest.mark.parametrize("sizes", [(32, 48), (576, 192), (576, 1536), (1536, 576), (33, 101)])
def test_a_row_does_not_depend_on_how_many_there_are(sizes):
    linear, x = nn.Linear(*sizes).requires_grad_(False), torch.randn(max(ROWS), sizes[0])
    with prepack(linear):
        single = torch.cat([linear(row[None]) for row in x])
        for (
            rows
        ) in ROWS:  # with AVX2 bit for bit; with AVX-512 the kernels of few and of many rows sum in another order
            torch.testing.assert_close(linear(x[:rows]), single[:rows], atol=2e-6, rtol=1e-6)


def test_gradients_take_the_stock_path(linear):
    x = torch.randn(5, 32, requires_grad=True)
    with prepack(linear):
        linear(x).sum().backward()
        torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(5, 32))
        for parameter in linear.parameters():  # a bias alone may be trained
            parameter.requires_grad_(True)
            linear(x.detach()).sum().backward()
            assert parameter.grad is not None
            parameter.requires_grad_(False)
        with torch.no_grad():
            assert not linear(x).requires_grad


def test_autocast_and_another_dtype_take_the_stock_path(linear):
    x = torch.randn(5, 32)
    with prepack(linear):
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
        linear.bfloat16()
        assert linear(x.bfloat16()).dtype == torch.bfloat16
        with pytest.raises(RuntimeError):
            linear(x)
        linear.float()
        torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight, linear.bias), atol=1e-5, rtol=0)


CHANGES = {
    "load_state_dict": lambda linear, new: linear.load_state_dict({"weight": new, "bias": linear.bias}),
    "assign": lambda linear, new: linear.load_state_dict({"weight": new, "bias": linear.bias}, assign=True),
    "in place": lambda linear, new: linear.weight.copy_(new),
    "data": lambda linear, new: setattr(linear.weight, "data", new),
    "parameter": lambda linear, new: setattr(linear, "weight", nn.Parameter(new, requires_grad=False)),
    "address used again": lambda linear, new: [setattr(linear.weight, "data", new.clone()) for _ in range(2)],
    "there and back": lambda linear, new: (linear.weight.copy_(new), linear.bfloat16(), linear.float()),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changed_weights_are_packed_again(linear, change):
    x = torch.randn(5, 32)
    with prepack(linear):
        before = linear(x)
        CHANGES[change](linear, torch.randn(48, 32))
        after = linear(x)
        torch.testing.assert_close(after, nn.functional.linear(x, linear.weight, linear.bias), atol=1e-4, rtol=1e-4)
        assert (after - before).abs().max() > 0.1
        (pack,) = packs(linear)
        assert pack.of(linear.weight) is pack.of(linear.weight)  # and only once


def test_layers_with_a_forward_of_their_own_stay(linear):
    hooked = copy.deepcopy(linear)
    hooked.forward = lambda input: input
    others = [Scaled(32, 48), hooked, parametrizations.weight_norm(nn.Linear(32, 48)), nn.Linear(32, 48).bfloat16()]
    with torch.inference_mode():
        others.append(nn.Linear(32, 48))
    model = nn.ModuleList([linear, *others])
    with prepack(model):
        assert prepared(model) == [linear]
    assert hooked.forward("same") == "same" and prepared(model) == []


# A model


def test_installing_and_undoing(target):
    before = {name: dict(vars(module)) for name, module in target.named_modules()}
    state = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    handle = prepack(target)
    linears = [module for module in target.modules() if isinstance(module, nn.Linear)]
    assert prepared(target) == linears and target.lm_head in linears
    again = prepack(target)  # finds nothing to do, and undoes nothing
    again.undo()
    assert (again.bytes, prepared(target)) == (0, linears)
    with handle.paused():
        assert prepared(target) == []
    assert prepared(target) == linears
    assert {name: tensor.data_ptr() for name, tensor in target.state_dict().items()} == state
    with handle as model:
        assert model is target
    assert {name: dict(vars(module)) for name, module in target.named_modules()} == before
    handle.undo()
    assert handle.bytes == 0


def test_undoing_leaves_the_forward_of_someone_else(linear):
    handle, other = prepack(linear), nn.Identity().forward
    linear.forward = other
    handle.undo()
    assert linear.forward == other


def test_an_error_inside_restores_the_model(llama):
    handle = prepack(llama)
    with pytest.raises(KeyError), handle.paused():
        raise KeyError
    assert prepared(llama)
    with pytest.raises(KeyError), handle:
        raise KeyError
    assert not prepared(llama)


def test_shared_weights_are_packed_once():
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).requires_grad_(False)
    model[1].weight = model[0].weight
    handle = prepack(model)
    assert handle.bytes == 4 * 32 * 32 and len(set(packs(model))) == 1
    tied = make_target("llama_tied")
    with prepack(tied) as target:
        assert target.lm_head.weight is target.get_input_embeddings().weight
        sizes = {linear.weight.numel() for linear in prepared(target)}
        assert len(sizes) > 2 and prepack(target).bytes == 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_logits_are_those_of_the_stock_model(name):
    target = make_target(name)
    drafter = make_drafter(target)
    for rows in (1, 5, 20):
        stock = target(prompt_of(rows)).logits
        with prepack(target):
            result = target(prompt_of(rows)).logits
        torch.testing.assert_close(result, stock, atol=1e-4, rtol=0)
    assert prepack(drafter).bytes == 4 * sum(linear.weight.numel() for linear in prepared(drafter))


@pytest.mark.parametrize("pattern", [None, *PATTERNS])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafted_equals_plain_on_a_prepared_target(name, pattern):
    target, prompt = make_target(name), prompt_of(9)
    drafter = scripted_for(target, prompt, pattern) if pattern else make_drafter(target, num_hidden_layers=2)
    stock = plain(target, prompt)
    with prepack(target), prepack(drafter):
        expected = plain(target, prompt)
        for num_tokens in (1, 4, 8):
            out = drafted(target, drafter, prompt, num_assistant_tokens=num_tokens, return_dict_in_generate=True)
            assert torch.equal(out.sequences, expected)
    assert pattern in (None, "wrong") or sum(out.stats.accepted) > 0
    assert torch.equal(expected, stock)  # no near tie in this text
    # The control: the target really decodes with what was packed.
    handle = prepack(target)
    for pack in packs(target):
        pack.packed = torch.ops.mkldnn._reorder_linear_weight(-pack.source, 8)
    assert not torch.equal(plain(target, prompt), expected)
    handle.undo()
    assert torch.equal(plain(target, prompt), expected)


# Copies


def test_a_prepared_model_saves_as_it_is(tmp_path, llama):
    drafter = make_drafter(llama)
    for name, model in {"target": llama, "drafter": drafter}.items():
        model.save_pretrained(tmp_path / name)
        with prepack(model):
            model.save_pretrained(tmp_path / f"prepared-{name}")
        for file in ("model.safetensors", "config.json"):
            saved = [(tmp_path / folder / file).read_bytes() for folder in (name, f"prepared-{name}")]
            assert saved[0] == saved[1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "prepared-target").eval()
    assert torch.equal(plain(loaded, prompt_of(5)), plain(llama, prompt_of(5)))


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
@torch.no_grad()
def test_a_copy_packs_its_own_weights(llama, how):
    handle, ids = prepack(llama), prompt_of(5)
    expected = llama(ids).logits
    if how == "deepcopy":
        copied = copy.deepcopy(llama)
    else:
        torch.save(llama, file := io.BytesIO())
        copied = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert len(prepared(copied)) == len(prepared(llama)) and set(packs(copied)).isdisjoint(packs(llama))
    assert torch.equal(copied(ids).logits, expected)
    copied.lm_head.weight.zero_()
    assert not copied(ids).logits.any() and torch.equal(llama(ids).logits, expected)
    handle.undo()
    assert not prepared(llama) and prepared(copied)


# Refusals


@pytest.mark.parametrize(
    "model, kinds",
    [
        (nn.Linear(8, 8).bfloat16(), "torch.bfloat16 on cpu"),
        (nn.Linear(8, 8, device="meta"), "torch.float32 on meta"),
        (nn.Embedding(8, 8), "none"),
    ],
    ids=str,
)
def test_a_model_with_nothing_to_pack_is_refused(model, kinds):
    with pytest.raises(
        ValueError, match=f"{type(model).__name__} has no linear layer to prepack.*its are: {kinds}. Load"
    ):
        prepack(model)


def test_a_torch_without_onednn_is_refused(linear, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs oneDNN"):
        prepack(linear)
    assert not prepared(linear)
