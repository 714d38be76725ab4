"""What the frozen target contributes to training, from one forward over packed documents; and which target that was."""

import hashlib

import torch

from data.collator import packed_row


VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# Where documents do not see each other, this is 0 (measured, float32 and bfloat16). Where they do, it is above 0.14 from
# the first layer on (SmolLM2); between the two lies what a mixture of experts rounds differently.
LEAK = 0.02


def check_length(target, longest: int):
    """Raise ValueError where a document of ``longest`` tokens is longer than what the target was made to read."""
    limit = target.config.get_text_config().max_position_embeddings
    if longest > limit:
        raise ValueError(
            f"a document of {longest} tokens is longer than the target's context of {limit}: pack the conversations with "
            f"--max_seq_len {limit} or less"
        )


@torch.no_grad()
def target_signals(target, row: dict, layer_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafter's features and the teacher's last hidden states of a packed row; no document sees another.

    Args:
        target (`PreTrainedModel`): A causal language model.
        row (`dict`): As [`data.collator.packed_row`] makes it, on the target's device.
        layer_ids (`list[int]`): Hidden states to read, see [`default_layer_ids`]: `i` is what enters layer `i`.

    Returns:
        Features `(1, tokens, layers * hidden_size)`, and the output of the final norm, which the head takes, `(1, tokens,
        hidden_size)`; both in the target's dtype. Raises ValueError as `check_length`.
    """
    check_length(target, row["max_length_q"])
    last = target.config.get_text_config().num_hidden_layers
    # Documents stay apart only without a mask and without a cache: then `position_ids` (or the varlen arguments, for
    # flash attention) tell where each one starts. The head is not needed, and all but skipped.
    states = target(
        input_ids=row["input_ids"],
        position_ids=row["position_ids"],
        attention_mask=None,
        use_cache=False,
        output_hidden_states=[*layer_ids, last],
        logits_to_keep=1,
        **{name: row[name] for name in VARLEN if target.config._attn_implementation.startswith("flash")},
    ).hidden_states
    return torch.cat([states[i] for i in layer_ids], dim=-1), states[last]


def to_device(row: dict, device) -> dict:
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in row.items()}


def check_isolation(target, layer_ids: list[int]):
    """Refuse a target whose packed documents see each other: recurrent layers, or attention that ignores their borders.

    Raises:
        ValueError: The signals of a document change with the document before it.
    """
    vocabulary = target.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (3, 16), generator=torch.Generator().manual_seed(0))
    signals = []
    for neighbour in ids[:2]:
        block = {"input_ids": torch.cat([neighbour, ids[2]]), "seq_lengths": [16, 16]}
        row = to_device(packed_row([block]), target.device)
        signals.append(torch.cat(target_signals(target, row, layer_ids), dim=-1)[0, 16:].float())
    leak = ((signals[0] - signals[1]).norm() / signals[1].norm()).item()
    if not leak <= LEAK:  # NaN as well
        raise ValueError(
            f"the documents of a packed block are not kept apart by {type(target).__name__} with attention "
            f"{target.config._attn_implementation!r}: the hidden states of one change by {leak:.1%} with the one before "
            "it. Use another --attn_implementation (sdpa); targets with recurrent layers cannot be used."
        )


def weights_fingerprint(model) -> str:
    """SHA-256 over the name, shape and first 32 values of every parameter, rounded to bfloat16.

    It tells a model from another of the same shape, a fine-tuned one too, and is the same for any dtype that holds the
    checkpoint's values exactly; it does not prove that two are equal.
    """
    total = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:32].to("cpu", torch.bfloat16).float()
        total.update(f"{name} {tuple(parameter.shape)} ".encode() + values.numpy().tobytes())
    return total.hexdigest()
