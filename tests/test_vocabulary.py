"""The draft vocabulary and the mask token, from counts of the blocks."""

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data.vocabulary import choose_draft_vocabulary, choose_mask_token, count_tokens


VOCAB = 64


def build_tokenizer(*added, template=None):
    """Ids 0 to 2 are ordinary words, 3 is the end of sequence; the added tokens follow."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    tokenizer.add_tokens([AddedToken(token, special=True) for token in added])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", ["<unused7>", "<|reserved_special_token_3|>"])
def test_the_mask_token_is_a_reserved_one_rather_than_any_other_special_token(name):
    tokenizer = build_tokenizer("<fim>", name, "<image>")
    assert choose_mask_token(tokenizer, set()) == tokenizer.convert_tokens_to_ids(name)


def test_without_reserved_tokens_the_mask_token_is_another_special_one():
    tokenizer = build_tokenizer("<fim>", "<image>")
    assert tokenizer.convert_ids_to_tokens(choose_mask_token(tokenizer, {3})) in ("<fim>", "<image>")


def test_the_mask_token_is_never_in_the_template_the_data_or_the_stop_ids():
    tokenizer = build_tokenizer("<unused0>", "<unused1>", "<unused2>", "<last>", template="{{ '<unused0>' }}")
    seen, stop = ({tokenizer.convert_tokens_to_ids(token)} for token in ("<unused1>", "<unused2>"))
    assert choose_mask_token(tokenizer, seen | stop) == tokenizer.convert_tokens_to_ids("<last>")
    assert choose_mask_token(tokenizer, seen) == tokenizer.convert_tokens_to_ids("<unused2>")


def test_when_every_special_token_has_a_use_the_message_names_the_option():
    tokenizer = build_tokenizer("<seen>", "<turn>", template="<turn>")
    with pytest.raises(ValueError, match="--mask_token_id"):
        choose_mask_token(tokenizer, {tokenizer.convert_tokens_to_ids("<seen>"), 3})


# Supervised: five times 40, three times 30, twice 20, once 10; token 7 only in prompts.
ROWS = Dataset.from_list(
    [
        {"input_ids": [7, 7, 7, 7, 40, 40, 40, 30, 20], "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1, 1]},
        {"input_ids": [7, 7, 40, 40, 30, 30, 20, 10, 7], "loss_mask": [0, 0, 1, 1, 1, 1, 1, 1, 0]},
    ]
)


def test_tokens_are_counted():
    seen, supervised = count_tokens(ROWS, VOCAB)
    assert {int(i): (int(seen[i]), int(supervised[i])) for i in seen.nonzero()[0]} == {
        7: (7, 0),
        10: (1, 1),
        20: (2, 2),
        30: (3, 3),
        40: (5, 5),
    }


def test_the_draft_vocabulary_is_the_most_frequent_supervised_tokens_and_their_share():
    chosen, coverage = choose_draft_vocabulary(count_tokens(ROWS, VOCAB)[1], 2, set())
    assert chosen.tolist() == [30, 40] and coverage == 8 / 11


def test_the_draft_vocabulary_has_the_stop_ids_whether_seen_or_not():
    chosen, coverage = choose_draft_vocabulary(count_tokens(ROWS, VOCAB)[1], 3, {10, 63})
    assert chosen.tolist() == [10, 40, 63] and coverage == 6 / 11


@pytest.mark.parametrize("size", [1, 4, 5, 12, 41, VOCAB])
def test_the_draft_vocabulary_has_its_size_ascending_and_within_the_vocabulary(size):
    chosen, coverage = choose_draft_vocabulary(count_tokens(ROWS, VOCAB)[1], size, {2})
    assert len(chosen) == size and 2 in chosen
    assert chosen.tolist() == sorted(set(chosen.tolist())) and chosen.max() < VOCAB
    assert (coverage == 1) == (size >= 5)


def test_without_any_supervised_token_the_draft_vocabulary_still_has_its_size():
    chosen, coverage = choose_draft_vocabulary(np.zeros(VOCAB, np.int64), 4, {9})
    assert chosen.tolist() == [0, 1, 2, 9] and coverage == 0
