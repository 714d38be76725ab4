"""Batches: every row as plain decoding writes it, in the batch and alone, however differently the rows advance."""

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    PATTERNS,
    ROOT,
    TARGETS,
    VOCAB,
    WINDOW,
    Recorder,
    TinyTokenizer,
    drafted,
    make_drafter,
    make_target,
    plain,
    prompt_of,
)
from test_generation import letter_tokenizer
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
)

import batch_peagle
from batch_peagle import BatchCache
from configuration_peagle import PEagleBackboneConfig
from modeling_peagle import Drafter
from modeling_peagle_backbone import PEagleBackboneModel
from tree_peagle import DraftTree
from verification_peagle import Continuation


STATIC = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0)]
LENGTHS = {"short": [3, 6], "around the window": [WINDOW - 1, WINDOW + 1, 1], "long": [5, 21, 13, 21]}
SHAPES = {"chain": None, "none": 0, "5": 5, "16": 16, "static": STATIC}
PLANS = [PATTERNS["right"], PATTERNS["wrong"], PATTERNS["mixed"], PATTERNS["mixed"][2:]]


def batch_of(lengths):
    """Prompts of these lengths, padded on the left, with their mask."""
    prompts = [prompt_of(length, seed=row)[0] for row, length in enumerate(lengths)]
    widths = [(max(lengths) - length, 0) for length in lengths]
    ids = torch.stack([F.pad(prompt, width, value=2) for prompt, width in zip(prompts, widths)])
    mask = torch.stack([F.pad(torch.ones_like(prompt), width) for prompt, width in zip(prompts, widths)])
    return ids, {"attention_mask": mask, "max_new_tokens": 10}


class Script:
    """Drafts that are right or wrong by a plan per row, from a real drafter whose proposals are replaced.

    `drafts` has the rows of each drafter forward, `batches` those of each target forward after the prefill.
    """

    def __init__(self, monkeypatch, reference, mask, plans=PLANS, wide=False):
        self.padding = (mask == 0).sum(dim=1).tolist()
        self.reference, self.plans, self.wide = reference.tolist(), plans, wide
        self.drawn, self.drafts, self.batches, self.caches = [0] * len(reference), [], [], []
        draft_rows, masks, script = batch_peagle.draft_rows, batch_peagle.tree_masks, self

        class Numbered(BatchCache):
            """Knows which row of the first batch each of its rows is."""

            def __init__(self, batch):
                super().__init__(batch)
                self.rows = list(range(batch))
                script.caches.append(self)

            def select(self, rows):
                super().select(rows)
                self.rows = [self.rows[row] for row in rows]

            def keep(self, paths):
                super().keep(paths)
                script.kept(self)

        def scripted(drafter, input_ids, features, num_tokens, cache, embedding=None):
            whole = min(map(len, features)) > 0  # else the first pieces of long prompts
            logits = draft_rows(drafter, input_ids, features, num_tokens, cache, embedding)
            if not whole:
                return logits
            self.drafts.append(len(features))
            self.look(drafter, logits, cache, embedding)
            return torch.stack([self.row(row, length, num_tokens) for row, length in zip(cache.rows, cache.lengths)])

        def counted(model, trees, *rest):
            self.batches.append(len(trees))
            return masks(model, trees, *rest)

        monkeypatch.setattr(batch_peagle, "BatchCache", Numbered)
        monkeypatch.setattr(batch_peagle, "draft_rows", scripted)
        monkeypatch.setattr(batch_peagle, "tree_masks", counted)

    def row(self, row, length, num_tokens):
        logits, plan = torch.zeros(num_tokens, VOCAB), self.plans[row % len(self.plans)]
        continuation = self.reference[row][self.padding[row] + length + 1 :] + [0] * num_tokens
        for depth in range(num_tokens):
            right = plan[self.drawn[row] % len(plan)]
            logits[depth, (continuation[depth] + (not right)) % VOCAB] = 6
            if self.wide and self.drawn[row] % 2:  # another token is more probable
                logits[depth, VOCAB - 2 - depth] = 6.5
            self.drawn[row] += 1
        return logits

    def kept(self, cache):
        pass

    def look(self, drafter, logits, cache, embedding):
        pass


def assert_greedy(monkeypatch, target, ids, options, **settings):
    """As plain decoding of the batch and of each row alone, with a random drafter and one right in some places."""
    expected, mask = plain(target, ids, **options), options["attention_mask"].bool()
    for row, own in enumerate(mask):
        alone = plain(target, ids[row : row + 1, own], max_new_tokens=options["max_new_tokens"])
        assert torch.equal(expected[row, int((~own).sum()) :], alone[0])
    drafter = make_drafter(target, num_hidden_layers=2)
    assert torch.equal(drafted(target, drafter, ids, **options, **settings), expected)
    with monkeypatch.context() as patch:
        Script(patch, expected, mask, wide=settings["draft_tree"] is not None)
        out = drafted(target, drafter, ids, return_dict_in_generate=True, **options, **settings)
    assert torch.equal(out.sequences, expected)
    assert sum(out.stats.emitted) == len(ids) * (options["max_new_tokens"] - 1)
    assert sum(out.stats.accepted) > 3 or settings["draft_tree"] == 0


@pytest.mark.parametrize(
    ("name", "lengths", "shape"),
    [
        ("llama", "short", None),
        ("llama", "long", STATIC),
        ("qwen3", "around the window", 5),
        ("gemma3", "around the window", None),
        ("gemma3", "long", 16),
        ("gemma3_composite", "long", 5),
    ],
)
def test_greedy_output_equals_plain(monkeypatch, name, lengths, shape):
    assert_greedy(monkeypatch, make_target(name), *batch_of(LENGTHS[lengths]), draft_tree=shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_output_equals_plain_over_the_whole_grid(monkeypatch, name, lengths, shape):
    target = make_target(name)
    for num_tokens in (1, 3, 8):
        assert_greedy(monkeypatch, target, *batch_of(lengths), draft_tree=shape, num_assistant_tokens=num_tokens)


@pytest.mark.parametrize("name", ["llama", "gemma3_composite"])
def test_eager_attention_decodes_batches_too(monkeypatch, name):
    target = make_target(name)
    target.set_attn_implementation("eager")
    assert_greedy(monkeypatch, target, *batch_of(LENGTHS["around the window"]), draft_tree=STATIC)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_limit_and_no_drafts(monkeypatch, name):
    target = make_target(name)
    ids, options = batch_of([4, 9, 2])
    reference = plain(target, ids, **options)
    for limit in range(1, 8):
        with monkeypatch.context() as patch:
            Script(patch, reference, options["attention_mask"], wide=limit % 2)
            own = options | {"max_new_tokens": limit, "num_assistant_tokens": 3}
            out = drafted(target, make_drafter(target), ids, draft_tree=[None, 6, 0][limit % 3], **own)
        assert torch.equal(out, reference[:, : 9 + limit])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_end_at_different_times_in_pad_tokens(monkeypatch, name):
    target = make_target(name)
    ids, options = batch_of([4, 9, 2, 6])
    reference = plain(target, ids, **options)
    drafter = make_drafter(target)
    for places in ([1, 4, 6, 9], [7, 0, 2, 0]):  # of the token that ends the row
        eos = [reference[row, 9 + place].item() for row, place in enumerate(places)]
        expected = plain(target, ids, eos_token_id=eos, **options)
        with monkeypatch.context() as patch:
            script = Script(patch, reference, options["attention_mask"])
            out = drafted(target, drafter, ids, eos_token_id=eos, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, expected)
        # A finished row takes part in no further forward.
        assert len(out.stats.emitted) == sum(script.batches)
        assert len(script.batches) >= len(script.drafts) >= len(script.batches) - 1


def test_rows_advance_independently(monkeypatch):
    """The row whose drafts are right is done in 3 rounds, the other in 12; each round is one forward of either model."""
    target, (ids, options) = make_target("llama"), batch_of([4, 7])
    options["max_new_tokens"] = 13
    expected = plain(target, ids, **options)
    script, forwards = Script(monkeypatch, expected, options["attention_mask"], plans=PLANS[:2]), []
    drafter = make_drafter(target)
    hooks = [
        model.register_forward_hook(lambda *_, name=name: forwards.append(name), always_call=True)
        for name, model in (("target", target), ("drafter", drafter))
    ]
    assert torch.equal(drafted(target, drafter, ids, num_assistant_tokens=3, **options), expected)
    for hook in hooks:
        hook.remove()
    assert script.batches == [2] * 3 + [1] * 9
    assert script.drafts == [2] * 3 + [1] * 8  # the last token needs no draft
    assert forwards.count("target") == 1 + len(script.batches) and forwards.count("drafter") == len(script.drafts)


# Caches, features and slots


class Watch(Script):
    """Compares both caches after each round, and what the drafter says, with fresh ones of each row alone."""

    rounds = 0

    def __init__(self, monkeypatch, reference, mask, *, target, **settings):
        super().__init__(monkeypatch, reference, mask, **settings)
        self.target, self.texts, start = target, [], Continuation.__init__

        def watched(text, *args):
            start(text, *args)
            self.texts.append(text)

        monkeypatch.setattr(batch_peagle.Continuation, "__init__", watched)

    def text(self, row):
        return self.texts[row].sequence[:, self.padding[row] :]

    def assert_equal(self, cache, index, fresh, length):
        assert cache.lengths[index] == length
        for layer, other in zip(cache.layers, fresh.layers, strict=True):
            for ours, theirs in ((layer.keys, other.keys), (layer.values, other.values)):
                rows = theirs.shape[-2]  # a sliding layer keeps only the last
                torch.testing.assert_close(ours[index, :, length - rows : length], theirs[0], atol=2e-5, rtol=1e-4)

    def kept(self, cache):
        if cache is not self.caches[0]:
            return  # the drafter's
        self.rounds += len(self.batches) > 0
        for index, row in enumerate(cache.rows):
            fresh, text = DynamicCache(config=self.target.config), self.text(row)
            self.target(text[:, :-1], cache=fresh)
            self.assert_equal(cache, index, fresh, text.shape[1] - 1)

    def look(self, drafter, logits, cache, embedding):
        ids = drafter.config.eagle_aux_hidden_state_layer_ids
        for index, row in enumerate(cache.rows):
            fresh, text = DynamicCache(), self.text(row)
            states = self.target(text[:, :-1], output_hidden_states=True, use_cache=False).hidden_states
            features = torch.cat([states[i] for i in ids], dim=-1)
            expected = drafter.draft(text[0], features, logits.shape[1], fresh, embedding)
            torch.testing.assert_close(logits[index], expected, atol=2e-5, rtol=1e-4)
            self.assert_equal(cache, index, fresh, fresh.get_seq_length())


def watched(monkeypatch, target, lengths, **settings):
    ids, options = batch_of(lengths)
    expected = plain(target, ids, **options)
    watch = Watch(monkeypatch, expected, options["attention_mask"], target=target, wide=True)
    out = drafted(target, make_drafter(target), ids, num_assistant_tokens=3, **options, **settings)
    assert torch.equal(out, expected)
    assert watch.rounds > 3 and len(watch.drafts) > 3


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma3_composite"])
def test_both_caches_and_the_drafts_are_those_of_each_row_alone(monkeypatch, name):
    watched(monkeypatch, make_target(name), [3, 10, 6], draft_tree=7)


FAULTS = ["padding is seen", "padding is kept", "other nodes are kept", "positions by column", "no window", "causal"]


@pytest.mark.parametrize("fault", FAULTS)
def test_known_faults_are_seen(monkeypatch, fault):
    target, masks, keep = make_target("gemma3"), batch_peagle.tree_masks, BatchCache.keep
    if fault == "padding is seen":
        blind = lambda model, trees, depths, lengths: masks(model, trees, depths, [max(lengths)] * len(trees))  # noqa: E731
        monkeypatch.setattr(batch_peagle, "tree_masks", blind)
    elif fault == "padding is kept":
        every = lambda cache, paths: keep(cache, [range(max(map(len, paths))) for _ in paths])  # noqa: E731
        monkeypatch.setattr(BatchCache, "keep", every)
    elif fault == "other nodes are kept":
        first = lambda cache, paths: keep(cache, [list(range(len(path))) for path in paths])  # noqa: E731
        monkeypatch.setattr(BatchCache, "keep", first)
    elif fault == "positions by column":

        def wrong(_, args, inputs):
            if isinstance(inputs.get("attention_mask"), dict):  # not in the prefill
                positions = inputs["position_ids"]
                inputs["position_ids"] = positions - positions[:, :1] + positions.max()
            return args, inputs

        target.register_forward_pre_hook(wrong, with_kwargs=True)
    elif fault == "no window":
        monkeypatch.setattr(batch_peagle, "sliding_window_overlay", lambda window: lambda *_: True)
    else:
        causal = lambda tree: torch.ones(len(tree.depths), len(tree.depths)).tril().bool()  # noqa: E731
        monkeypatch.setattr(DraftTree, "ancestors", causal)
    with pytest.raises(AssertionError):
        watched(monkeypatch, target, [3, 10, 6], draft_tree=7)


@pytest.mark.parametrize("kind", ["own", "backbone"])
def test_long_prompts_are_read_in_pieces_by_both_kinds_of_drafter(monkeypatch, kind):
    target, (ids, options) = make_target("gemma3"), batch_of([4, 17, 11])
    drafter = make_drafter(target)
    if kind == "backbone":
        config = PEagleBackboneConfig.for_backbone(
            target, TinyTokenizer(), target, TinyTokenizer(), mask_token_id=5, num_depths=8
        )
        drafter = PEagleBackboneModel.from_backbone(target, config).eval()
    monkeypatch.setattr(Drafter, "max_slots", 5)
    options["max_new_tokens"] = 4
    expected = plain(target, ids, **options)
    Watch(monkeypatch, expected, options["attention_mask"], target=target)
    if kind == "backbone":  # its first slot has no features, and its columns are counted from there
        monkeypatch.setattr(Script, "row", lambda self, row, length, depths: torch.zeros(depths, VOCAB))
    assert torch.equal(drafted(target, drafter, ids, **options), expected)


# Sampling


def joint_law(target, prompt, count=2):
    """The law of the next tokens, each one of the three most probable ones at the temperature 0.4."""
    if count == 0:
        return {(): 1.0}
    logits, tokens = target(prompt).logits[0, -1].topk(3)
    law = {}
    for token, p in zip(tokens.tolist(), (logits / 0.4).softmax(-1).tolist()):
        following = joint_law(target, torch.cat([prompt, torch.tensor([[token]])], dim=1), count - 1)
        law |= {(token, *rest): p * q for rest, q in following.items()}
    return law


def chi_square(rows, law):
    counts = dict.fromkeys(law, 0)
    for pair in rows:
        counts[tuple(pair)] += 1
    return sum((count - len(rows) * law[pair]) ** 2 / (len(rows) * law[pair]) for pair, count in counts.items())


@pytest.mark.parametrize("shape", [None, 6], ids=["chain", "tree"])
def test_sampled_rows_are_independent_and_have_the_law_of_the_target(monkeypatch, shape):
    target, prompt = make_target("llama", seed=4), prompt_of(5)
    options = {"do_sample": True, "top_k": 3, "temperature": 0.4, "max_new_tokens": 2, "num_return_sequences": 200}
    law = joint_law(target, prompt)
    torch.manual_seed(0)
    out = drafted(target, make_drafter(target), prompt, draft_tree=shape, **options)
    assert out.shape == (200, 7)
    bound = 27.9  # what a chi-square of 8 degrees of freedom exceeds once in 2,000 times
    assert chi_square(out[:, 5:].tolist(), law) < bound
    # A rule that keeps a draft token too often, and rows that share their draws, are seen.
    draw = torch.multinomial

    def biased(probabilities, num_samples):
        return draw(probabilities**3, num_samples)

    def shared(probabilities, num_samples):
        torch.manual_seed(7)
        return draw(probabilities, num_samples)

    for wrong in (biased, shared) if shape else ():
        monkeypatch.setattr("verification_peagle.torch.multinomial", wrong)
        torch.manual_seed(0)
        out = drafted(target, make_drafter(target), prompt, draft_tree=shape, **options)
        assert chi_square(out[:, 5:].tolist(), law) > bound


# Processors and criteria


class ByRow(LogitsProcessor):
    """Bans what the row's number and its text say."""

    def __call__(self, input_ids, scores):
        tokens = torch.arange(scores.shape[-1])
        banned = (tokens[None] + torch.arange(len(scores))[:, None] + input_ids.sum(1, keepdim=True)) % 3 == 0
        return scores.masked_fill(banned, -torch.inf)


def allowed(row, ids):
    return [token for token in range(6, VOCAB) if (token + row + len(ids)) % 4]


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[40], [58], [88, 75]]},
    "min_length": {"min_new_tokens": 4, "eos_token_id": list(range(40))},
    "decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": list(range(6, 12))},
    "prefix": {"prefix_allowed_tokens_fn": allowed},
    "own": {"logits_processor": LogitsProcessorList([ByRow()])},
    "lambda": {"logits_processor": [lambda ids, scores: scores + (torch.arange(VOCAB) == 2 * len(ids) + 3) * 50.0]},
}


OF_ROWS = ["repetition_penalty", "encoder_repetition_penalty", "encoder_no_repeat_ngram", "prefix", "own"]


@pytest.mark.parametrize(
    ("name", "expanded"), [(name, False) for name in PROCESSORS] + [(name, True) for name in OF_ROWS]
)
def test_processors_see_their_own_row_and_its_number(monkeypatch, name, expanded):
    target, (ids, options) = make_target("llama"), batch_of([4, 9, 2])
    ids = plain(target, ids, **options)[:, 6:]  # so that what follows has been there before
    options["attention_mask"] = F.pad(options["attention_mask"], (0, 10), value=1)[:, 6:]
    options |= PROCESSORS[name]
    # Sampling of the most probable token alone.
    expand = {"do_sample": True, "top_k": 1, "num_return_sequences": 2} if expanded else {}
    expected = plain(target, ids, **options, **expand)
    mask = options["attention_mask"].repeat_interleave(2 if expanded else 1, dim=0)
    Script(monkeypatch, expected, mask, wide=True)
    out = drafted(target, make_drafter(target), ids, draft_tree=9, return_dict_in_generate=True, **options, **expand)
    assert torch.equal(out.sequences, expected)
    assert sum(out.stats.accepted) > 0
    assert not torch.equal(expected, plain(target, ids, **options | dict.fromkeys(PROCESSORS[name]), **expand))


@pytest.mark.parametrize("shape", [None, 0, 7])
def test_prompt_lookup_and_padding(monkeypatch, shape):
    target, (ids, options) = make_target("gemma3"), batch_of([3, 12])
    text, mask = plain(target, ids, **options), options["attention_mask"]
    ids = torch.cat([text, text[:, 12:]], dim=1)
    options["attention_mask"] = F.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    assert_greedy(monkeypatch, target, ids, options, draft_tree=shape, prompt_lookup_num_tokens=5)


def test_stop_strings_and_criteria_end_each_row(monkeypatch):
    target, (ids, options) = make_target("llama"), batch_of([4, 9, 2])
    reference = plain(target, ids, **options)
    strings = [chr(33 + reference[0, 13].item()), chr(33 + reference[2, 11].item())]
    settings = {
        "strings": {"stop_strings": strings, "tokenizer": letter_tokenizer()},
        # Each row its own length, by its number.
        "criterion": {
            "stopping_criteria": StoppingCriteriaList(
                [lambda ids, scores, **_: ids.shape[1] >= 11 + 3 * torch.arange(len(ids))]
            )
        },
    }
    for own in settings.values():
        own |= {"eos_token_id": 1}
        expected = plain(target, ids, **options, **own)
        assert (expected[:, -1] == 0).any() and not torch.equal(expected, reference)
        with monkeypatch.context() as patch:
            Script(patch, reference, options["attention_mask"])
            assert torch.equal(drafted(target, make_drafter(target), ids, **options, **own), expected)


# The ways in


def test_without_attaching():
    target, (ids, options) = make_target("llama"), batch_of([4, 7])
    out = plain(
        target,
        ids,
        custom_generate=str(ROOT),
        trust_remote_code=True,
        assistant_model=make_drafter(target),
        **options,
    )
    assert torch.equal(out, plain(target, ids, **options))


def test_images(monkeypatch):
    """The prefill reads them; what follows is text."""
    target, (ids, options) = make_target("gemma3_composite"), batch_of([9, 12])
    target.model.multi_modal_projector.mm_input_projection_weight.data.normal_()
    ids[:, 4:8] = target.config.image_token_id
    options["token_type_ids"] = (ids == target.config.image_token_id).long()
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    expected = plain(target, ids, pixel_values=pixels, **options)
    assert not torch.equal(expected, plain(target, ids, pixel_values=pixels.flip(0), **options))
    Script(monkeypatch, expected, options["attention_mask"], wide=True)
    out = drafted(target, make_drafter(target), ids, pixel_values=pixels, draft_tree=8, **options)
    assert torch.equal(out, expected)


# Refusals


REFUSED = {
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "logits": ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
    "streamer": ({"streamer": Recorder()}, "streamer"),
    "cache": ({"cache": DynamicCache()}, "pass no cache"),
    "static": ({"cache_implementation": "static"}, "cache_implementation"),
    "guidance": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor counts the steps"),
    "right padding": ({"attention_mask": torch.tensor([[1] * 5, [1] * 4 + [0]])}, "pad on the left"),
    "hole": ({"attention_mask": torch.tensor([[1] * 5, [0, 1, 0, 1, 1]])}, "pad on the left"),
    "all hidden": ({"attention_mask": torch.tensor([[1] * 5, [0] * 5])}, "hides a whole prompt"),
    "no end": ({"stop_strings": "x", "tokenizer": letter_tokenizer()}, "StopStringCriteria"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_batch_cannot_do_is_refused_by_name(name):
    target, (settings, words) = make_target("llama"), REFUSED[name]
    with pytest.raises(ValueError, match=words):
        drafted(target, make_drafter(target), batch_of([5, 5])[0], **settings)


def test_targets_that_cannot_decode_a_batch_are_refused():
    target, ids = make_target("llama"), batch_of([5, 5])[0]
    target.config.attention_chunk_size = 4
    with pytest.raises(ValueError, match="chunked_attention: decode one prompt"):
        drafted(target, make_drafter(target), ids)
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="cannot decode a batch.*one prompt at a time"):
        drafted(target, make_drafter(target), ids)
