"""Drafting one token after the other, as EAGLE-3 does (https://huggingface.co/papers/2503.01840), with the slots of
`modeling_peagle.py`: the same positions, the same attention rule, the same cache.

Where a mask slot holds a reserved token and `mask_hidden`, a slot of a sequential drafter holds the token that was drafted
at the depth before, and what the drafter itself put out there. So its slots are read in waves, one for each depth. Decoding
picks the tokens in between; in training they are those of the text, and gradients go back through all waves, which is
EAGLE-3's training-time test.
"""

from itertools import pairwise

import torch
from transformers import DynamicCache


def best(scores: torch.Tensor) -> torch.LongTensor:
    """The index of the best one in each row of scores."""
    return scores.argmax(dim=-1)


def waves(feature_index: torch.LongTensor) -> list[tuple[int, int]]:
    """The ranges of slots, in order, within which none needs what another puts out; for the argument see [`slot_layout`]."""
    slots = torch.arange(feature_index.shape[1], device=feature_index.device)
    needed = (slots + feature_index).masked_fill(feature_index >= 0, -1).amax(dim=0)
    starts = [0]
    for slot, other in enumerate(needed.tolist()):
        if other >= starts[-1]:
            starts.append(slot)
    return [*pairwise([*starts, len(slots)])]


def read_in_waves(drafter, input_ids, features, feature_index, position_ids, visible, embedding, cache, pick=None):
    """The slots through the drafter's layers, depth by depth; for the arguments see [`PEagleModel.forward`].

    Args:
        pick (`Callable`, *optional*): Decoding: each wave but the first is one slot, whose token this picks from the scores
            `(batch, draft_vocab_size)` of the slot before. The tokens of `input_ids` stand there otherwise.

    Returns:
        `(hidden_states, logits)`: before the final norm, `(batch, slots, hidden_size)`; and with `pick` the scores of the
        last slot of each wave, `(batch, waves, draft_vocab_size)`, else None.
    """
    cache = DynamicCache() if cache is None else cache
    read = visible.shape[-1] - visible.shape[1]
    given = drafter.fused(features)  # what slots start from: the target's features, then their own outputs
    source = torch.arange(given.shape[1], given.shape[1] + input_ids.shape[1], device=input_ids.device) + feature_index
    source = torch.where(feature_index < 0, source, feature_index)
    outputs, logits = [], []
    for start, end in waves(feature_index):
        tokens = input_ids[:, start:end]
        if logits:
            tokens = drafter.draft_ids()[pick(logits[-1])][:, None]
        hidden_states = given.gather(1, source[:, start:end, None].expand(-1, -1, given.shape[-1]))
        hidden_states = drafter.through_layers(
            hidden_states, tokens, position_ids[:, start:end], visible[:, start:end, : read + end], embedding, cache
        )
        outputs.append(hidden_states)
        own = drafter.norm(hidden_states) if drafter.config.norm_output else hidden_states
        given = torch.cat([given, own], dim=1)
        if pick is not None:
            logits.append(drafter.head(drafter.norm(hidden_states[:, -1])))
    return torch.cat(outputs, dim=1), torch.stack(logits, dim=1) if logits else None
