"""Whether to draft, on a clock of its own: what calls lose and gain, one after the other, by costs and acceptance that are given."""

import itertools
import math
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import PATTERNS, drafted, make_scripted, make_target, plain, prompt_of
from test_sizing import AUTO, CHEAP, DEAR, confident

import sizing_peagle
from sizing_peagle import Costs, History, Sizer, history_of
from tree_peagle import DraftTree


OWN = Costs([1, 5], [95.0, 121.0], 8.7, 2.1)  # SmolLM2 with its drafter on two cores
READER = Costs(DEAR.rows, DEAR.target, DEAR.draft, read=0.003)


def tree_of(nodes: int, probability: float) -> DraftTree:
    return DraftTree.chain(list(range(nodes)), [math.log(probability) * (depth + 1) for depth in range(nodes)])


class Service:
    """Calls one after the other with one pair, or each with a new one. `seconds` is their time, `plain` that of plain decoding."""

    def __init__(self, costs, probability=0.7, prompt=20, carried=True, clock=None, truth=None, pace=1.0):
        self.costs, self.probability, self.prompt, self.carried = costs, probability, prompt, carried
        self.clock, self.truth, self.pace = clock, truth or Costs.round, pace
        self.history, self.seconds, self.plain, self.rounds = History(), 0.0, 0.0, 0

    def call(self, tokens, kept, fixed=None):
        """`kept(round)` draft tokens would be right; `fixed` of them are drafted in every round if set. Which rounds drafted."""
        sizer = Sizer(self.costs, 8, self.clock is not None, self.history if self.carried else None)
        unread, drafting, emitted = self.prompt, [], 0
        for number in itertools.count():
            if emitted >= tokens:
                break
            drafts = sizer.drafts(unread) if fixed is None else True
            tree = tree_of(min(8, tokens - emitted - 1), self.probability) if drafts else DraftTree.chain([])
            drafts = bool(tree.tokens)
            if drafts:
                tree = sizer.cut(tree) if fixed is None else tree.first(fixed)
            new = 1 + min(kept(number), len(tree.tokens))
            seconds = self.truth(self.costs, len(tree.tokens), unread) if drafts else self.costs.forward(1)
            self.seconds += seconds
            if self.clock:
                self.clock.now += self.pace * seconds
            if fixed is None:
                sizer.record([tree], [new])
            unread, emitted, drafting = new if drafts else unread + 1, emitted + new, [*drafting, drafts]
        self.plain += emitted * self.costs.forward(1)
        self.rounds += sum(drafting)
        return drafting

    @property
    def lost(self) -> float:
        """In tokens of plain decoding."""
        return (self.seconds - self.plain) / self.costs.forward(1)


class Clock:
    """In the place of the clock: `now` moves as the test says."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(sizing_peagle, "time", SimpleNamespace(perf_counter=lambda: self.now))


def nothing(_):
    return 0


def everything(_):
    return 8


# One call


@pytest.mark.parametrize("probability", [0.01, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("costs", [CHEAP, DEAR])
def test_a_hopeless_drafter_is_tried_ever_more_rarely(costs, probability):
    service = Service(costs, probability)
    tried = [number for number, drafts in enumerate(service.call(200, nothing)) if drafts]
    assert 0 < service.lost < 0.03 * 200 and len(tried) < 35
    pauses = [b - a for a, b in itertools.pairwise(tried) if b - a > 1]
    assert len(pauses) < 2 or pauses[-1] > pauses[0]
    service = Service(costs, probability)
    service.call(5000, nothing)
    assert service.lost < 0.005 * 5000
    eager = Service(costs, probability)
    eager.call(200, nothing, fixed=4)
    assert eager.lost > 0.08 * 200


@pytest.mark.parametrize("share", [0.1, 0.25, 0.4])
def test_a_poor_drafter_loses_less_than_three_percent(share):
    """Right so rarely that drafting loses on the whole; now and then it gains, which must not tempt for long."""
    for seed in range(10):
        service, rng = Service(DEAR, 0.95), random.Random(seed)
        service.call(400, lambda _, rng=rng: int(rng.random() < share))
        assert service.lost < 2 + 0.025 * 400


def test_a_good_drafter_is_hardly_ever_paused():
    """It keeps 0.69 of four drafts on average, as the drafter for SmolLM2 does on held-out chats."""
    drafting, rounds, services = 0, 0, []
    for seed in range(10):
        service, rng = Service(OWN, 0.45), random.Random(seed)
        seen = service.call(400, lambda _, rng=rng: rng.choices(range(5), [50, 35, 11, 2, 2])[0])
        drafting, rounds, services = drafting + sum(seen), rounds + len(seen), [*services, service]
    assert drafting > 0.9 * rounds and max(service.lost for service in services) < 0.02 * 400
    assert sum(service.lost for service in services) < -0.15 * sum(
        service.plain for service in services
    ) / OWN.forward(1)


def test_a_drafter_that_becomes_good_is_taken_up_again():
    service = Service(DEAR)
    drafting = service.call(1000, lambda number: 8 * (number >= 200))
    assert service.lost < -400 and all(drafting[290:-1])


def test_a_text_that_stops_gaining_is_left_alone_however_much_the_pair_has_saved():
    """Behind a long prompt the pair saves more, as reading such a prompt asks for it; that is not for other losses."""

    def lost(bad):
        service = Service(READER, prompt=8000)
        service.history.balance = 100.0
        service.call(900 + bad, lambda number: 8 * (number < 100))
        return service.lost

    assert 0 < lost(300) - lost(0) < sizing_peagle.SAVINGS + 0.03 * 300


def test_a_drafter_that_is_not_trusted_is_put_to_the_test_where_it_promises_much():
    history = History()
    history.trust = 0.01
    assert len(Sizer(DEAR, 8, False, history).cut(tree_of(8, 0.9)).tokens) == 1
    assert len(Sizer(DEAR, 8, False, history).cut(tree_of(8, 0.01)).tokens) == 0
    assert len(Sizer(DEAR, 8, False).cut(tree_of(8, 0.9)).tokens) == 8


# Call after call


@pytest.mark.parametrize("costs", [CHEAP, DEAR, OWN])
@pytest.mark.parametrize("probability", [0.3, 0.95])
def test_short_answers_that_keep_nothing_lose_less_than_three_percent_together(costs, probability):
    """A hundred of 20 tokens. Where each begins anew, all lose what the first loses, and more than a tenth."""
    service = Service(costs, probability)
    for number in range(100):
        service.call(20, nothing)
        assert service.lost < 3 + 0.03 * 20 * (number + 1)
    assert service.lost < 0.01 * 2000
    forgetful = Service(costs, probability, carried=False)
    for _ in range(50):
        forgetful.call(20, nothing)
    assert forgetful.lost > 0.08 * 1000 > 3 + 0.03 * 1000


@pytest.mark.parametrize("costs", [CHEAP, DEAR, OWN])
def test_gains_are_not_gambled_away(costs):
    """All is kept until the drafter is trusted most, and nothing from then on: of that part, too, little is lost."""
    for good in (1, 20):
        service = Service(costs)
        for _ in range(good):
            service.call(20, everything)
        assert service.lost < 0
        before = service.lost
        for _ in range(100):
            service.call(20, nothing)
        assert service.lost < 3 + 0.03 * 20 * (good + 100) and service.lost - before < 12 + 0.01 * 2000


@pytest.mark.parametrize("costs", [CHEAP, DEAR, OWN])
@pytest.mark.parametrize(("tokens", "probability"), [(20, 0.99), (200, 0.99), (200, 0.7)])
def test_where_all_is_kept_it_is_as_quick_as_the_best_fixed_size(costs, tokens, probability):
    """Also with a drafter that is less sure than it should be."""

    def seconds(fixed=None):
        service = Service(costs, probability)
        for _ in range(10):
            service.call(tokens, everything, fixed)
        return service.seconds

    sizes = [seconds(size) for size in range(1, 9)]
    assert seconds() < min(sizes) / 0.95 and seconds() < max(sizes) * 0.95


def test_after_hopeless_calls_good_ones_are_found_again():
    service = Service(DEAR)
    for _ in range(60):
        service.call(20, nothing)
    lost, tried = service.lost, service.rounds
    for _ in range(40):
        service.call(20, everything)
    assert service.lost < lost - 400 and service.rounds > tried + 80


def test_texts_of_which_some_gain_are_all_tried_while_the_whole_gains():
    gains, losses = [], []
    service, rng = Service(DEAR), random.Random(0)
    for number in range(100):
        before = service.lost
        good = number % 2
        service.call(30, lambda _, good=good: good * rng.choices(range(5), [30, 30, 20, 10, 10])[0])
        (gains if good else losses).append(service.lost - before)
    assert sum(gains) / 50 < -6 and sum(losses) / 50 < 2.5


def test_a_drafter_that_is_too_sure_of_itself_is_trusted_less(monkeypatch):
    """It says 0.8 of every token, of which half are right: so many deep drafts do not pay."""

    def seconds():
        service = Service(DEAR, 0.8)
        for seed in range(20):
            rng = random.Random(seed)
            right = lambda _, rng=rng: next(depth for depth in range(99) if rng.random() < 0.5)  # noqa: E731
            service.call(100, right)
        return service.seconds, service.history.trust

    (learned, trust), _ = seconds(), monkeypatch.setattr(sizing_peagle, "LEARNING", 0.0)
    assert 0.45 < trust < 0.85 and learned < 0.97 * seconds()[0]


# What was not read


def test_reading_is_paid_for():
    """Behind a prompt of 8000 tokens the drafter reads for 24 tokens of decoding before it drafts the first."""
    step, prefill = READER.forward(1), READER.forward(8000) / READER.forward(1)
    for tokens in (20, 100):
        service = Service(READER, prompt=8000)
        for number in range(30):
            service.call(tokens, nothing)
            assert service.lost < 3 + 0.03 * (tokens + prefill) * (number + 1)
        assert 0 < service.rounds
        for _ in range(30):
            service.call(400, everything)
        assert service.lost < -20 * 200
    assert READER.reading(8000) > 20 * step and Sizer(READER, 8, False).drafts(20)
    assert not Sizer(READER, 8, False).drafts(8000)


# The clock


def test_costs_that_were_measured_wrongly_are_corrected(monkeypatch):
    """On the clock a round with drafts takes twice what the costs say: keeping one in each does not pay at all."""
    wrong = lambda costs, nodes, unread: 2 * costs.round(nodes, unread)  # noqa: E731
    for clock, fair in ((Clock(monkeypatch), True), (None, False)):
        service = Service(DEAR, 0.6, clock=clock, truth=wrong)
        for _ in range(100):
            service.call(20, lambda _: 1)
        assert (service.lost < 3 + 0.03 * 2000) == fair  # the costs deny it
        assert fair or service.lost > 0.2 * 2000


@pytest.mark.parametrize("pace", [0.3, 1.0, 4.0])
def test_neither_another_pace_nor_a_slow_round_throws_a_call_off(monkeypatch, pace):
    numbers = itertools.count()

    def truth(costs, nodes, unread):
        return (30 if next(numbers) in (17, 90) else 1) * costs.round(nodes, unread)

    service = Service(DEAR, clock=Clock(monkeypatch), truth=truth, pace=pace)
    drafting = service.call(600, lambda _: 2)
    assert sum(drafting) > 0.9 * len(drafting)


# Decoding


def test_a_call_begins_where_the_last_one_ended_and_gives_the_same_tokens():
    target, prompt = make_target("llama_tied"), prompt_of(6)
    options = {"max_new_tokens": 30, "draft_costs": DEAR} | AUTO
    reference = plain(target, prompt, max_new_tokens=30)
    wrong = confident(make_scripted(target, reference[0].tolist(), PATTERNS["wrong"]))
    tries = []
    for _ in range(6):
        before = len(wrong.calls)
        assert torch.equal(drafted(target, wrong, prompt, **options).sequences, reference)
        tries.append(len(wrong.calls) - before)
    assert tries[0] > 3 and sum(tries[1:]) <= 5
    # The drafter becomes right, and is found to be.
    wrong.plan = PATTERNS["right"]
    for _ in range(12):
        out = drafted(target, wrong, prompt, **options)
        assert torch.equal(out.sequences, reference)
    assert out.stats.tau > 4
    assert (
        history_of(target, wrong, 1, False, False).failures == 0
        and history_of(target, wrong, 1, True, False).balance == 2
    )


def test_samples_are_those_of_plain_sampling_whatever_was_learned():
    target, prompt, options = make_target("llama"), prompt_of(9), {"do_sample": True, "temperature": 0.7}
    torch.manual_seed(3)
    expected = plain(target, prompt, **options)
    drafter = confident(make_scripted(target, expected[0].tolist(), PATTERNS["mixed"]))
    for balance, trust in ((2.0, 1.0), (-1.0, 0.2), (8.0, 3.0), (8.0, 0.1)):
        history = history_of(target, drafter, 1, False, False)
        history.balance, history.trust = balance, trust
        torch.manual_seed(3)
        assert torch.equal(drafted(target, drafter, prompt, draft_costs=CHEAP, **AUTO, **options).sequences, expected)


def test_two_threads_learn_together():
    target, prompt = make_target("llama"), prompt_of(7)
    reference = plain(target, prompt)
    drafter = confident(make_scripted(target, reference[0].tolist(), PATTERNS["wrong"]))
    outputs = []

    def work():
        with torch.no_grad():
            for _ in range(3):
                outputs.append(plain(target, prompt, assistant_model=drafter, draft_costs=DEAR))

    with drafter.attach(target):
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(outputs) == 6 and all(torch.equal(each, reference) for each in outputs)
    assert history_of(target, drafter, 1, False, False).failures > 0
