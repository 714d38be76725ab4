"""Faster float32 linear layers on a CPU for the few rows that speculative decoding asks for.

A stock layer brings its whole weight into oneDNN's layout at every call of more than one row, so that 5 rows cost about
3 times as much as one and verification eats what drafting gains. [`prepack`] does it once, at the price of a second copy
of the weights. A row's result then hardly depends on how many rows there are: with AVX2 it is bit for bit the same from 1
to 290 rows, where stock layers differ by about 1e-6; with AVX-512 some shapes differ by less than that. (Measured with torch
2.13, oneDNN 3.12, one and two threads.)
"""

import functools
from contextlib import contextmanager

import torch
from torch import nn


# The layout is chosen for about so many rows. One chosen for 1 row is no faster there, and as slow as stock from 2 on.
ROWS = 8


class PackedWeight:
    """A weight `(out_features, in_features)` in oneDNN's layout, packed at its first use and anew once it has changed."""

    key = None

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        if self.key != (weight.data_ptr(), weight._version):
            # Kept alive, or its address might be given to other weights, and the key would not tell them apart.
            self.source = weight.detach()
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.source, ROWS)
            self.key = weight.data_ptr(), weight._version
        return self.packed

    def __getstate__(self):
        return {}  # what is packed cannot be copied or pickled: a copy packs its own


def fits(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype == torch.float32


def packed_forward(linear: nn.Linear, pack: PackedWeight, input: torch.Tensor) -> torch.Tensor:
    """`linear(input)` for `(..., in_features)`; the stock way for gradients, autocast and other dtypes or devices."""
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (input, *linear.parameters(False)))
    if differentiable or torch.is_autocast_enabled("cpu") or not (fits(input) and fits(linear.weight)):
        return nn.Linear.forward(linear, input)
    return torch.ops.mkldnn._linear_pointwise(input, pack.of(linear.weight), linear.bias, "none", [], "")


def prepack(model: nn.Module) -> "Prepacked":
    """Make the linear layers of a target or a drafter fast for a few rows. Preparing twice is the same as once.

    Replaces `forward` on each instance of `nn.Linear` that has float32 weights on the CPU and no forward of its own. The
    weights themselves stay where they are, so saving, tying and borrowing them goes on as before. They may change: a
    layer notices at its next call and packs them again, unless they were written in place through `.data`, which torch
    does not record: undo first, and prepare again. A deep copy is prepared as well, and cannot be undone.

    Use the [`Prepacked`] that is returned in a `with` statement, or call its `undo()`, to restore the model.

    Raises:
        ValueError: Not one layer can be prepared; the message says why.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("Prepacking needs oneDNN, which this build of torch lacks: take another, or do not prepack.")
    packed, forwards, prepared, kinds = {}, {}, False, set()
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        weight, own = linear.weight, vars(linear).get("forward")
        kinds.add(f"{weight.dtype} on {weight.device.type}")
        if isinstance(own, functools.partial) and own.func is packed_forward:
            prepared = True
        # Parametrised and quantised weights are no plain parameters; inference tensors do not record their changes.
        elif own is None and type(linear).forward is nn.Linear.forward and type(weight) is nn.Parameter:
            if fits(weight) and not weight.is_inference():
                pack = packed.setdefault(weight, PackedWeight())  # tied layers share one
                pack.of(weight)
                forwards[linear] = functools.partial(packed_forward, linear, pack)
    if not (forwards or prepared):
        raise ValueError(
            f"{type(model).__name__} has no linear layer to prepack. That takes plain torch.float32 weights on cpu, and "
            f"its are: {', '.join(sorted(kinds)) or 'none'}. Load it in float32 on a CPU, or do not prepack."
        )
    return Prepacked(model, forwards, sum(pack.packed.nbytes for pack in packed.values()))


class Prepacked:
    """Undoes [`prepack`]: a context manager, or call `undo()`. One that found the model prepared does nothing.

    bytes (`int`): Memory that the packed weights take, padding aside.
    """

    def __init__(self, model: nn.Module, forwards: dict, bytes: int):
        self.model = model
        self.install(forwards, bytes)

    def __enter__(self):
        return self.model

    def __exit__(self, *_):
        self.undo()

    def install(self, forwards: dict, bytes: int):
        self.forwards, self.bytes = forwards, bytes
        for linear, forward in forwards.items():
            linear.forward = forward

    def undo(self):
        for linear, forward in self.forwards.items():
            if vars(linear).get("forward") is forward:
                del linear.forward
        self.forwards, self.bytes = {}, 0

    @contextmanager
    def paused(self):
        """A `with` statement in which the layers are stock again; the packed weights are kept for afterwards."""
        kept = self.forwards, self.bytes
        self.undo()
        try:
            yield
        finally:
            self.install(*kept)
