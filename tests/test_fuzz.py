"""Random drafters, shapes, lengths and limits: no crash, and no other token than those of plain decoding."""

import functools

import pytest
import torch
from conftest import VOCAB, WINDOW, drafted, make_drafter, make_scripted, make_target, plain, prompt_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import decoding_peagle
from tree_peagle import DraftTree


LONGEST, DEEPEST = 19, 8
target_of = functools.cache(make_target)


@functools.cache
def reference_of(name, length):
    """Plain decoding: the text of a lower limit is the beginning of this one."""
    return plain(target_of(name), prompt_of(length), max_new_tokens=LONGEST)[0].tolist()


@st.composite
def fixed_trees(draw):
    paths = [()]
    for _ in range(draw(st.integers(1, 14))):
        above = draw(st.sampled_from([path for path in paths if len(path) < DEEPEST]))
        paths.append((*above, draw(st.integers(0, 4))))
    return list(dict.fromkeys(paths[1:]))


CASES = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["llama", "gemma3"]),
        "length": st.integers(1, 2 * WINDOW + 3),
        "limit": st.integers(1, LONGEST),
        "end": st.none() | st.integers(0, LONGEST - 1),  # where a token of the text is one that ends it
        "depth": st.integers(1, DEEPEST),
        "shape": st.none() | st.integers(0, 24) | fixed_trees(),
        "lookup": st.none() | st.integers(1, 6),
        "sampled": st.booleans(),  # from one token each, as the draws of a chain go other ways
        # Random weights; or right or wrong by a pattern, the right token being the likeliest or not.
        "drafter": st.fixed_dictionaries(
            {
                "seed": st.integers(0, 9),
                "num_hidden_layers": st.integers(1, 2),
                "markov_rank": st.sampled_from([0, 3]),
                "draft_ids": st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=5, max_size=40),
            }
        )
        | st.tuples(st.lists(st.booleans(), min_size=1, max_size=9), st.sampled_from([1.0, 6.0]), st.booleans()),
    }
)


def drafter_of(case, target, reference):
    if isinstance(case["drafter"], dict):
        fields = dict(case["drafter"])
        if fields["draft_ids"]:
            fields["draft_ids"] = torch.tensor(sorted(fields["draft_ids"]))
        drafter = make_drafter(target, **fields)
        if fields["markov_rank"]:
            torch.nn.init.normal_(drafter.markov_head.next.weight)
        return drafter
    plan, sharpness, decoys = case["drafter"]
    drafter = make_scripted(target, reference, plan)
    draft = drafter.draft

    def sharpened(*args):
        logits = sharpness * draft(*args)
        if decoys:
            logits[::2, VOCAB - 1] += sharpness + 0.5
        return logits

    drafter.draft = sharpened
    return drafter


def check(case):
    target, length, limit = target_of(case["name"]), case["length"], case["limit"]
    reference = reference_of(case["name"], length)
    expected = reference[: length + limit]
    options = {"max_new_tokens": limit, "num_assistant_tokens": case["depth"], "draft_tree": case["shape"]}
    options |= {"prompt_lookup_num_tokens": case["lookup"], "return_dict_in_generate": True}
    if case["sampled"]:
        options |= {"do_sample": True, "top_k": 1}
    if case["end"] is not None:
        options["eos_token_id"] = end = reference[length + case["end"]]
        if end in expected[length:]:
            expected = expected[: expected.index(end, length) + 1]
    out = drafted(target, drafter_of(case, target, reference), prompt_of(length), **options)
    assert out.sequences[0].tolist() == expected
    assert sum(out.stats.emitted) == len(expected) - length - 1
    assert out.cache.get_seq_length() == len(expected) - 1


def fuzz(examples, **options):
    return settings(max_examples=examples, derandomize=True, database=None, deadline=None, **options)(
        given(CASES)(check)
    )


def test_random_cases_decode_as_plainly():
    fuzz(40)()


@pytest.mark.slow
def test_many_random_cases_decode_as_plainly():
    fuzz(3000)()


@pytest.mark.parametrize("fault", ["unchecked draft", "causal mask", "rows not moved"])
def test_faults_are_found(monkeypatch, fault):
    if fault == "unchecked draft":
        accept = decoding_peagle.Continuation.accept

        def trusting(text, logits, tree):
            logits[0, tree.tokens[:1]] = 1e9
            return accept(text, logits, tree)

        monkeypatch.setattr(decoding_peagle.Continuation, "accept", trusting)
    elif fault == "causal mask":
        causal = lambda tree: torch.ones(len(tree.tokens) + 1, len(tree.tokens) + 1).tril().bool()  # noqa: E731
        monkeypatch.setattr(DraftTree, "ancestors", causal)
    else:
        monkeypatch.setattr(decoding_peagle, "keep_path", lambda cache, path, size: cache.crop(len(path) - size))
    with pytest.raises(AssertionError):
        fuzz(60, phases=[Phase.generate], report_multiple_bugs=False)()
