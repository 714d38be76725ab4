"""What a slot loses, and what its loss counts: one function each, chosen by the flags of the same names.

The losses compare one slot's scores with the target's distribution over the draft vocabulary. A drafter is judged by
how many of its tokens are kept, and a token at depth d only comes to be looked at if those before it were.
"""

import torch
import torch.nn.functional as F


LK_RATE = 3.0  # how fast the hybrid loss turns from KL to TV as the acceptance grows
DECAY = 0.8


def acceptance(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """How likely a token drawn from the drafter is kept under sampling, `sum(min(p, q))`, that is 1 - TV(p, q).

    `logits` and the probabilities `teacher` are `(rows, draft_vocab_size)`; the result is `(rows,)`, differentiable.
    """
    return torch.minimum(teacher, logits.softmax(dim=-1)).sum(dim=-1)


class KLDivergence(torch.autograd.Function):
    """KL(teacher || softmax(logits)) of each row, in few passes over memory, which are what it costs on a CPU."""

    @staticmethod
    def forward(ctx, logits, teacher):
        top, token = logits.max(dim=-1, keepdim=True)
        drafter = logits.softmax(dim=-1)
        logsumexp = (top - drafter.gather(-1, token).log())[:, 0]
        entropy = -torch.linalg.vecdot(teacher, teacher.clamp(min=torch.finfo(teacher.dtype).tiny).log_())
        ctx.save_for_backward(drafter.sub_(teacher))  # the gradient
        return logsumexp - torch.linalg.vecdot(teacher, logits) - entropy

    @staticmethod
    def backward(ctx, gradient):
        (difference,) = ctx.saved_tensors
        return difference * gradient[:, None], None


def kl(logits, teacher, label) -> torch.Tensor:
    """KL(teacher || drafter) of each row, `(rows,)`; for the arguments see [`acceptance`] and [`ce`]."""
    return KLDivergence.apply(logits, teacher)


def ce(logits, teacher, label) -> torch.Tensor:
    """Cross entropy of each row with the token that the target generated (the loss of the P-EAGLE paper), `(rows,)`.

    `label` is its index in the draft vocabulary, `(rows,)`; -100, where it is not in there, loses nothing.
    """
    return F.cross_entropy(logits, label, reduction="none", ignore_index=-100)


def lk(logits, teacher, label) -> torch.Tensor:
    """The hybrid LK loss: KL while little would be accepted, then 1 - acceptance, whose minimum is what decoding gains.

    The share of KL is `exp(-LK_RATE * acceptance)`. From https://huggingface.co/papers/2602.23881.
    """
    accepted = acceptance(logits, teacher)
    share = torch.exp(-LK_RATE * accepted.detach())
    return share * kl(logits, teacher, label) + (1 - share) * (1 - accepted)


LOSSES = {"kl": kl, "ce": ce, "lk": lk}


def uniform(anchor, depth, accepted) -> torch.Tensor:
    """Every slot counts the same (COD sampling alone makes the deeper ones rarer)."""
    return torch.ones(len(depth), device=depth.device)


def decay(anchor, depth, accepted) -> torch.Tensor:
    """Each depth counts `DECAY` of the one before."""
    return torch.full((len(depth),), DECAY, device=depth.device) ** depth


def survival(anchor, depth, accepted) -> torch.Tensor:
    """How likely decoding comes to look at a slot: the product of the acceptances before it in its own chain.

    Args:
        anchor, depth (`torch.LongTensor` of shape `(rows,)`): The slots; the chains are whole.
        accepted (`torch.Tensor` of shape `(rows,)`): Their [`acceptance`], without a gradient; the others do not need it.
    """
    _, chain = torch.unique(anchor, return_inverse=True)
    reached = accepted.new_ones(len(anchor), len(torch.bincount(depth)) + 1)
    reached[chain, depth + 1] = accepted
    return reached.cumprod(dim=1)[chain, depth]


WEIGHTS = {"uniform": uniform, "decay": decay, "survival": survival}
