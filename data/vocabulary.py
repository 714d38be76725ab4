"""Which tokens the drafter can propose, and which one stands in its mask slots: both chosen by counting the blocks."""

import re

import numpy as np
import torch


def count_tokens(blocks, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each token occurs in the blocks (a `datasets.Dataset` with `input_ids` and `loss_mask`), and how often it
    is supervised: two int64 arrays of shape (vocab_size,)."""
    seen, supervised = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for batch in blocks.with_format("numpy").iter(256):
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"]):
            seen += np.bincount(ids, minlength=vocab_size)
            supervised += np.bincount(ids[mask.astype(bool)], minlength=vocab_size)
    return seen, supervised


def choose_draft_vocabulary(counts: np.ndarray, size: int, always: set[int]) -> tuple[torch.LongTensor, float]:
    """The `size` most frequent supervised tokens, and the share of supervised tokens that they cover.

    Args:
        counts (`np.ndarray` of shape `(vocab_size,)`): How often each token is supervised.
        size (`int`): Size of the draft vocabulary, at most vocab_size.
        always (`set[int]`): Tokens to include in any case (the turn's end).

    Returns:
        Ascending ids, shape `(size,)`, and a number from 0 to 1.
    """
    ranks = counts.copy()
    ranks[list(always)] = counts.sum() + 1
    # Of tokens that are seen as often, or never, the lowest ids come first: byte-pair vocabularies list frequent ones first.
    chosen = np.sort(np.argsort(-ranks, kind="stable")[:size])
    return torch.from_numpy(chosen), float(counts[chosen].sum() / max(counts.sum(), 1))


def choose_mask_token(tokenizer, used: set[int]) -> int:
    """A token that never occurs in text: reserved by the tokenizer, unknown to the chat template, absent from the data.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        used (`set[int]`): Ids in the training data, and those that end a turn.

    Raises:
        ValueError: There is none; the message says how to name one.
    """
    template = str(tokenizer.chat_template)
    used = used | {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    free = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if i not in used and str(t) not in template}
    reserved = [i for i, token in free.items() if re.search("unused|reserved", token)]
    if not free:
        raise ValueError(
            "The tokenizer has no reserved token left for the mask slots: name one that never occurs in your chats with "
            "--mask_token_id."
        )
    return min(reserved) if reserved else max(free)
