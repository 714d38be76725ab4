"""Draft trees: the best set of nodes, its mask, the laws behind it, and what else can be put into a tree."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_peagle import (
    Candidates,
    DraftTree,
    best_first,
    prompt_lookup,
    static_tree,
    with_branch,
)


FORK = DraftTree([5, 6, 5, 7], [0, 0, 1, 1], [-0.1, -3.0, -0.3, -2.0])


def laws(seed, depths, num, conditional=False):
    """Random candidates that hold 70 to 100 % of the probability of each depth."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(depths, num if conditional else 1, num, generator=generator).mul(1.5).log_softmax(-1)
    rows += torch.rand(rows.shape[:2], generator=generator)[..., None].mul(-0.3).add(1).log()
    tokens = [torch.randperm(50, generator=generator)[:num].tolist() for _ in range(depths)]
    return Candidates(tokens, [rows[0, :1].numpy(), *rows[1:].numpy()])


def given_laws(tokens, *log_probs):
    return Candidates(tokens, [np.array(law) for law in log_probs])


def law_of(proposed, depth, previous):
    rows = proposed.log_probs[depth]
    return rows[previous if len(rows) > 1 else 0].tolist()


def all_paths(proposed):
    """From each path of candidates to its log-probability."""
    paths, level = {}, {(): 0.0}
    for depth, tokens in enumerate(proposed.tokens):
        level = {
            (*path, i): log_prob + law_of(proposed, depth, path[-1] if path else 0)[i]
            for path, log_prob in level.items()
            for i in range(len(tokens))
        }
        paths |= level
    return paths


def token_paths(tree):
    tokens = [None, *tree.tokens]
    return [tuple(tokens[i] for i in tree.path(node)[1:]) for node in range(1, len(tokens))]


@st.composite
def trees(draw):
    """Any tree: tokens of a small alphabet, log-probabilities that fall along each path."""
    tree = DraftTree([], [], [])
    for _ in range(draw(st.integers(0, 12))):
        parent, token = draw(st.integers(0, len(tree.tokens))), draw(st.integers(0, 3))
        if token not in tree.children(parent):
            fall = draw(st.floats(-3, -0.01))
            log_prob = (tree.log_probs[parent - 1] if parent else 0.0) + fall
            tree = DraftTree([*tree.tokens, token], [*tree.parents, parent], [*tree.log_probs, log_prob])
    return tree


# The tree


def test_what_a_tree_tells_of_its_nodes():
    assert FORK.depths == [0, 1, 1, 2, 2]
    assert FORK.children(0) == {5: 1, 6: 2} and FORK.children(1) == {5: 3, 7: 4} and FORK.children(4) == {}
    assert FORK.path(0) == [0] and FORK.path(4) == [0, 1, 4]
    assert FORK.probability(0) == 1 and FORK.probability(3) == math.exp(-0.3)
    assert FORK.expected_accepted == pytest.approx(sum(map(FORK.probability, range(1, 5))))
    assert not FORK.is_chain
    assert FORK.ancestors().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]


@given(trees())
def test_the_mask_is_what_the_paths_say(tree):
    size = len(tree.tokens) + 1
    mask = tree.ancestors()
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[column in tree.path(row) for column in range(size)] for row in range(size)]
    assert mask.sum(dim=1).sub(1).tolist() == tree.depths
    # A causal mask would do for chains only.
    assert torch.equal(mask, torch.ones(size, size).tril().bool()) == tree.is_chain


@pytest.mark.parametrize("tokens", [[], [4], [4, 4, 9]])
def test_a_chain(tokens):
    tree = DraftTree.chain(tokens)
    assert tree.is_chain and tree.depths == list(range(len(tokens) + 1)) and tree.expected_accepted == len(tokens)
    assert tree.path(len(tokens)) == list(range(len(tokens) + 1))
    assert DraftTree.chain([1, 2], [-1.0, -2.0]).probability(2) == math.exp(-2)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (([1, 2], [0], [0.0, 0.0]), "one parent and one log-probability"),
        (([1], [1], [0.0]), "not before it"),
        (([1, 2], [2, 0], [0.0, 0.0]), "not before it"),
        (([1], [-1], [0.0]), "not before it"),
        (([1, 2, 1], [0, 0, 0], [0.0] * 3), "two children with the token 1"),
        (([1, 2], [0, 1], [-1.0, -0.5]), "more probable than its parent"),
        (([1], [0], [0.1]), "more probable than its parent"),
        (([1], [0], [math.nan]), "more probable than its parent"),
    ],
)
def test_what_is_no_tree_is_refused(lists, message):
    with pytest.raises(ValueError, match=message):
        DraftTree(*lists)


# The best tree


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize(("depths", "num"), [(1, 4), (2, 3), (3, 2), (4, 1)])
def test_best_first_is_the_best_of_all_trees_of_its_size(depths, num, conditional):
    for seed in range(3):
        proposed = laws(seed, depths, num, conditional)
        paths = all_paths(proposed)
        for num_nodes in range(1, min(len(paths), 7) + 1):
            best = max(
                sum(math.exp(paths[path]) for path in chosen)
                for chosen in itertools.combinations(paths, num_nodes)
                if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
            )
            tree = best_first(proposed, num_nodes)
            assert len(tree.tokens) == num_nodes
            assert tree.expected_accepted == pytest.approx(best, rel=1e-9)


def test_neither_the_chain_nor_the_likeliest_steps_are_the_best_tree():
    proposed = given_laws([[1, 2], [3, 4]], [[math.log(0.5), math.log(0.4)]], [[math.log(0.7), math.log(0.3)]])
    best, chain = best_first(proposed, 2), static_tree([(0,), (0, 0)], proposed)
    assert token_paths(best) == [(1,), (2,)] and best.expected_accepted == pytest.approx(0.9)
    assert chain.is_chain and chain.expected_accepted == pytest.approx(0.85)


def test_with_conditional_laws_the_marginal_tree_would_not_be_the_best():
    first, second = [[-0.6, -0.9]], [[-0.1, -3.0], [-3.0, -0.1]]
    proposed = given_laws([[1, 2], [3, 4]], first, second)
    blind = best_first(given_laws([[1, 2], [3, 4]], first, second[:1]), 4)
    assert token_paths(best_first(proposed, 4)) == [(1,), (1, 3), (2,), (2, 4)]
    assert (2, 3) in token_paths(blind)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 30))
def test_properties_of_best_first(seed, depths, num, conditional, num_nodes):
    proposed = laws(seed, depths, num, conditional)
    paths, tree = all_paths(proposed), best_first(proposed, num_nodes)
    assert len(tree.tokens) == min(num_nodes, len(paths))
    assert tree.log_probs == sorted(tree.log_probs, reverse=True)
    assert tree.log_probs == pytest.approx(sorted(paths.values(), reverse=True)[: len(tree.tokens)])
    tokens_of = {tuple(proposed.tokens[depth][i] for depth, i in enumerate(path)): path for path in paths}
    for path, log_prob in zip(token_paths(tree), tree.log_probs):
        assert log_prob == pytest.approx(paths[tokens_of[path]])
    more = best_first(proposed, num_nodes + 1)
    assert more.tokens[: len(tree.tokens)] == tree.tokens and more.parents[: len(tree.tokens)] == tree.parents
    assert max(best_first(proposed, num_nodes, max_depth=2).depths) <= 2


def test_expected_accepted_is_what_a_walk_over_the_tree_accepts():
    proposed = laws(0, 3, 3, conditional=True)
    tree, paths = best_first(proposed, 9), all_paths(proposed)
    accepted = 0.0
    for path, log_prob in paths.items():
        # The probability that the target takes this path and then leaves the candidates, or is at the last depth.
        following = law_of(proposed, len(path), path[-1]) if len(path) < 3 else []
        probability = math.exp(log_prob) * (1 - sum(map(math.exp, following)))
        node = steps = 0
        for depth, i in enumerate(path):
            node = tree.children(node).get(proposed.tokens[depth][i])
            if node is None:
                break
            steps += 1
        accepted += probability * steps
    assert tree.expected_accepted == pytest.approx(accepted)


def test_no_nodes_one_candidate_and_ties():
    assert best_first(laws(0, 3, 2), 0) == DraftTree([], [], [])
    assert best_first(laws(0, 3, 2), 5, max_depth=0) == DraftTree([], [], [])
    alone = best_first(laws(0, 4, 1), 9)
    assert alone.is_chain and len(alone.tokens) == 4
    half = math.log(0.5)
    even = given_laws([[1, 2], [3, 4]], [[half, half]], [[half, half]])
    assert token_paths(best_first(even, 5)) == [(1,), (2,), (1, 3), (1, 4), (2, 3)]
    certain = given_laws([[1, 2], [3, 4]], [[0.0, 0.0]], [[0.0, 0.0]])
    assert token_paths(best_first(certain, 4)) == [(1,), (2,), (1, 3), (1, 4)]


# One shape


@pytest.mark.parametrize("conditional", [False, True])
def test_a_static_tree_follows_the_ranks(conditional):
    proposed = laws(3, 3, 3, conditional)
    paths = [(1, 2, 0), (0,), (1,), (1, 2), (0, 0)]
    tree = static_tree(paths, proposed)
    expected = []
    for path in sorted(paths, key=len):
        tokens, previous, total = [], 0, 0.0
        for depth, rank in enumerate(path):
            law = law_of(proposed, depth, previous)
            previous = sorted(range(3), key=lambda i: -law[i])[rank]
            tokens.append(proposed.tokens[depth][previous])
            total += law[previous]
        expected.append((tuple(tokens), pytest.approx(total)))
    assert list(zip(token_paths(tree), tree.log_probs)) == expected
    every = [path for length in (1, 2, 3) for path in itertools.product(range(3), repeat=length)]
    whole = best_first(proposed, len(every))
    assert sorted(token_paths(static_tree(every, proposed))) == sorted(token_paths(whole))
    assert static_tree([], proposed) == DraftTree([], [], [])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([()], r"Path \(\) in draft_tree"),
        ([(0,), (0,)], "listed twice"),
        ([(0,), (1, 0)], r"\(1, 0\) in draft_tree needs \(1,\), which is missing"),
        ([(0,), (0, 0), (0, 0, 0)], "3 tokens deep"),
        ([(3,)], "from 0 to 2"),
        ([(-1,)], "from 0 to 2"),
    ],
)
def test_a_shape_that_is_no_tree_is_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        static_tree(paths, laws(0, 2, 3))


# Prompt lookup


def looked_up(tokens, num_tokens, max_ngram, min_ngram):
    for length in range(min(max_ngram, len(tokens)), min_ngram - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return tokens[end : end + num_tokens]
    return []


@settings(max_examples=150)
@given(st.lists(st.integers(0, 2), max_size=25), st.integers(0, 5), st.integers(1, 4), st.integers(1, 3))
def test_prompt_lookup_equals_a_search_from_the_end(tokens, num_tokens, max_ngram, min_ngram):
    before = [*tokens]
    found = prompt_lookup(tokens, num_tokens, max_ngram, min_ngram)
    assert found == looked_up(tokens, num_tokens, max_ngram, min_ngram)
    assert tokens == before and all(type(token) is int for token in found)


def test_prompt_lookup_takes_the_longest_then_the_most_recent():
    assert prompt_lookup([1, 2, 3, 7, 1, 2, 3, 8, 9, 2, 3, 5, 1, 2, 3], 2) == [8, 9]
    assert prompt_lookup([9, 2, 3, 5, 1, 2, 3], 9) == [5, 1, 2, 3]
    assert prompt_lookup([3, 5, 1, 2, 3], 9) == [], "one token is no n-gram of two"
    assert prompt_lookup([3, 5, 1, 2, 3], 9, min_ngram=1) == [5, 1, 2, 3]
    assert prompt_lookup([], 4) == prompt_lookup([1], 4) == []


# A branch beside the drafter's


def merged(tree, tokens, log_prob, max_nodes):
    """From each path to its log-probability: all of both, then one leaf after the other goes, of equal ones the last."""
    nodes = dict(zip(token_paths(tree), tree.log_probs))
    branch = [tuple(tokens[:length]) for length in range(1, min(len(tokens), max_nodes) + 1)]
    for path in branch:
        nodes.setdefault(path, nodes.get(path[:-1], 0.0) + log_prob)
    while len(nodes) > max_nodes:
        inner = {path[:-1] for path in nodes}
        leaves = [path for path in nodes if path not in inner and path not in branch]
        del nodes[min(reversed(leaves), key=nodes.get)]
    return nodes


@settings(max_examples=150)
@given(trees(), st.lists(st.integers(0, 3), max_size=5), st.floats(-3, 0), st.integers(0, 14))
def test_a_branch_is_in_the_tree_and_the_least_probable_leaves_make_room(tree, tokens, log_prob, max_nodes):
    copy = DraftTree([*tree.tokens], [*tree.parents], [*tree.log_probs])
    result = with_branch(tree, tokens, log_prob, max_nodes)
    assert tree == copy
    assert dict(zip(token_paths(result), result.log_probs)) == merged(tree, tokens, log_prob, max_nodes)
    node = 0
    for token in tokens[:max_nodes]:
        node = result.children(node)[token]


def test_a_branch_shares_what_it_can():
    assert with_branch(FORK, [5, 7], -1.0, 9) == FORK
    assert with_branch(FORK, [5, 7, 8], -1.0, 9) == DraftTree(
        [5, 6, 5, 7, 8], [0, 0, 1, 1, 4], [-0.1, -3.0, -0.3, -2.0, -3.0]
    )
    # Node 2 is the least probable, and then node 3 although it is more probable than the branch.
    assert with_branch(FORK, [5, 7, 8], -1.0, 4) == DraftTree([5, 5, 7, 8], [0, 1, 1, 3], [-0.1, -0.3, -2.0, -3.0])
    assert with_branch(FORK, [5, 7, 8], -1.0, 3) == DraftTree.chain([5, 7, 8], [-0.1, -2.0, -3.0])
    assert with_branch(FORK, [5, 7, 8], -1.0, 2) == DraftTree.chain([5, 7], [-0.1, -2.0])
    assert with_branch(DraftTree([], [], []), [4, 4], -0.5, 8) == DraftTree.chain([4, 4], [-0.5, -1.0])
    with pytest.raises(ValueError, match="more probable than its parent"):
        with_branch(FORK, [9], 0.5, 9)
