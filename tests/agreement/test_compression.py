"""Gradients in fewer bytes: what is sent, what is left, and that together they are the gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from widefield.agreement import (
    Compression,
    Connection,
    Death,
    Delay,
    DelayCompensation,
    Descent,
    ParameterServer,
    Workers,
    digits,
    quadratic,
    replay,
    simulate,
)
from widefield.agreement.compression import ErrorFeedback, pack, packed_bytes, unpack
from widefield.agreement.sample_account import SampleAccount, times_learned

ALL = [Compression("fp16"), Compression("int8", block=16), Compression("topk", share=0.1)]
SIZES = [0, 1, 7, 16, 17, 250]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def kind_of(options):
    return options.kind


def numbers(numel, dtype=torch.float64, seed=0):
    """Of sizes from 1e-3 to 10."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (4 * torch.rand(numel, generator=generator, dtype=torch.float64) - 3)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * sizes).to(dtype)


@pytest.mark.parametrize("options", ALL, ids=kind_of)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_those_of_the_formula(options, dtype):
    for numel in SIZES:
        packed = pack(numbers(numel, dtype), options)
        assert packed.dtype == torch.uint8 and packed.numel() == packed_bytes(numel, dtype.itemsize, options)
        found = unpack(packed, numel, dtype, options)
        assert found.dtype == dtype and found.shape == (numel,)


def test_the_formula_written_out():
    wide = torch.float64.itemsize
    assert packed_bytes(250, wide, Compression("fp16")) == 250 * 2 + 8
    assert packed_bytes(250, wide, Compression("int8", block=100)) == 250 + 3 * 8
    assert packed_bytes(250, 4, Compression("int8", block=100)) == 250 + 3 * 4
    assert packed_bytes(250, wide, Compression("topk", share=0.1)) == 25 * (4 + 8)
    assert packed_bytes(2**31 + 1, 4, Compression("topk", share=0.5)) == (2**30 + 1) * (8 + 4), "a place takes eight bytes"


def test_halves_are_those_of_scaled_numbers():
    values = numbers(50)
    largest = float(values.abs().max())
    scale = 2.0 ** (15 - math.ceil(math.log2(largest)))
    expected = torch.tensor([float(torch.tensor(float(one) * scale).half()) / scale for one in values], dtype=torch.float64)
    assert torch.equal(unpack(pack(values, ALL[0]), 50, torch.float64, ALL[0]), expected)
    assert (expected - values).abs().max() <= largest / 2048


def test_bytes_are_rounded_block_by_block():
    options, values = Compression("int8", block=16), numbers(50)
    expected = []
    for start in range(0, 50, 16):
        block = values[start : start + 16].tolist()
        scale = max(map(abs, block)) / 127
        expected += [round(one / scale) * scale for one in block]
    found = unpack(pack(values, options), 50, torch.float64, options)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_the_largest_are_sent_as_they_are():
    options, values = Compression("topk", share=0.1), numbers(50)
    largest = sorted(range(50), key=lambda place: -abs(float(values[place])))[:5]
    expected = torch.zeros(50, dtype=torch.float64)
    for place in largest:
        expected[place] = values[place]
    assert torch.equal(unpack(pack(values, options), 50, torch.float64, options), expected)


@pytest.mark.parametrize("options", ALL, ids=kind_of)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_what_was_sent_and_what_is_left_are_the_sum_of_all_gradients(options, dtype, tolerance):
    for numel in SIZES[1:]:
        feedback, sent, gradients = ErrorFeedback(options), torch.zeros(numel).double(), torch.zeros(numel).double()
        for step in range(40):
            gradient = numbers(numel, dtype, seed=step)
            packed, numbers_sent = feedback.pack(gradient)
            assert torch.equal(unpack(packed, numel, dtype, options), numbers_sent)
            sent, gradients = sent + numbers_sent.double(), gradients + gradient.double()
        off = (sent + feedback.left.double() - gradients).abs().max()
        assert off <= tolerance * max(1.0, float(gradients.abs().max())), numel


@pytest.mark.parametrize("options", ALL, ids=kind_of)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_refused_and_nothing_is_changed(options, bad):
    feedback, values = ErrorFeedback(options), numbers(20)
    feedback.pack(values)
    left = feedback.left.clone()
    values[3] = bad
    with pytest.raises(ValueError, match="1 of 20 numbers are NaN or infinite, and are not compressed"):
        feedback.pack(values)
    assert torch.equal(feedback.left, left)


@pytest.mark.parametrize("options", ALL, ids=kind_of)
@pytest.mark.parametrize("size", [0.0, 1e-300, 1e-45, 1e-30, 1e30, 1e300])
def test_sizes_from_nothing_to_the_largest_stay_finite(options, size):
    for dtype in (torch.float64, torch.float32):
        values = (numbers(40) * size).clamp(-1e38, 1e38).to(dtype) if dtype == torch.float32 else numbers(40) * size
        feedback = ErrorFeedback(options)
        _, sent = feedback.pack(values)
        assert torch.isfinite(sent).all() and torch.isfinite(feedback.left).all()
        assert (sent + feedback.left - values).abs().max() <= 1e-6 * float(values.abs().max())


def test_bytes_of_other_options_are_refused():
    packed = pack(numbers(20), ALL[0])
    with pytest.raises(ValueError, match="48 bytes for 20 numbers in torch.float64 by int8, which take 36; both ends"):
        unpack(packed, 20, torch.float64, ALL[1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Compression("zip"), "kind 'zip'; take fp16, int8 or topk"),
        (lambda: Compression("topk", share=0.0), "a share of 0.0"),
        (lambda: Compression("topk", share=1.5), "a share of 1.5"),
        (lambda: Compression("topk", share=math.nan), "a share of nan"),
        (lambda: Compression("int8", block=0), "for each 0 numbers"),
        (lambda: ParameterServer(kind="hogwild", compression=ALL[0]), "send nothing; leave compression out"),
        (lambda: ParameterServer(kind="synchronous", backup=1, compression=ALL[0]), "backup=1 drops late gradients"),
        (lambda: ParameterServer(compensation=DelayCompensation(1.0), compression=ALL[0]), "cannot be compensated"),
    ],
)
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# ---------------------------------------------------------------------------------------------- in the simulator


def trained_by_hand(objective, options, rate, *, epochs, batch):
    """Plain SGD of one worker with error feedback, as Karimireddy et al. write it, at a constant rate."""
    account, weights = SampleAccount(objective.num_samples, epochs, batch, 0), objective.start
    left = torch.zeros_like(weights)
    while samples := account.take(0):
        whole = objective.gradient_of(weights, samples) + left
        sent = unpack(pack(whole, options), whole.numel(), whole.dtype, options)
        weights, left = weights - rate * sent, whole - sent
        account.learned(0, by_all=True)
    return weights


@pytest.mark.parametrize("options", ALL, ids=kind_of)
@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_one_worker_is_sgd_with_error_feedback(options, kind):
    objective = quadratic(32, 11)
    rule = ParameterServer(Descent(lr=0.1), kind, compression=options)
    found = simulate(rule, objective, Workers(1), epochs=2, batch=4).weights
    torch.testing.assert_close(
        found, trained_by_hand(objective, options, 0.1, epochs=2, batch=4), rtol=1e-12, atol=1e-12
    )  # fmt: skip


def test_all_of_the_largest_numbers_is_no_compression():
    workers = Workers(3, Delay(1.0, "exponential"), {1: 3.0})
    plain = ParameterServer(Descent(lr=0.05, momentum=0.9), bound=2)
    found = simulate(replace(plain, compression=Compression("topk", share=1.0)), quadratic(), workers)
    torch.testing.assert_close(found.weights, simulate(plain, quadratic(), workers).weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", ALL, ids=kind_of)
@pytest.mark.parametrize("servers", [1, 3])
def test_bytes_and_replays_of_runs_with_several_servers_and_deaths(options, servers):
    objective = quadratic(64, 8)
    workers = Workers(
        4, Delay(1.0, "exponential"), {2: 3.0}, Connection(Delay(0.1), 1e4), (Death(0, 4.0, 9.0), Death(3, 6.0))
    )  # fmt: skip
    rule = ParameterServer(Descent(lr=0.05), servers=servers, compression=options)
    run = simulate(rule, objective, workers, epochs=3, batch=4)
    counts = [8] if servers == 1 else [3, 3, 2]
    gradients = [event for event in run.log.events if event.kind == "gradient"]
    assert {event.bytes for event in gradients} == {sum(packed_bytes(count, 8, options) for count in counts)}
    assert {event.bytes for event in run.log.events if event.kind == "read"} == {8 * count for count in counts}
    assert set(times_learned(run.log).values()) == {1}
    assert torch.equal(replay(run.log, rule, objective).weights, run.weights)


def test_smaller_messages_arrive_sooner():
    slow = Workers(4, connection=Connection(bytes_per_second=1e3))
    rules = (ParameterServer(kind="synchronous", compression=one) for one in (None, Compression("topk")))
    plain, small = (simulate(rule, digits(128), slow).seconds for rule in rules)
    sizes = 8 * 650, packed_bytes(650, 8, Compression("topk"))
    assert plain - small == pytest.approx(2 * (sizes[0] - sizes[1]) / 1e3, rel=1e-9), "of the two steps' last pushes"


def test_what_is_left_out_is_learned_later_and_without_feedback_it_is_not(monkeypatch):
    """On a quadratic, topk with feedback comes near the minimum; the tenth that is largest alone goes nowhere near."""
    objective, options = quadratic(32, 20), Compression("topk", share=0.05)
    rule = ParameterServer(Descent(lr=0.03), "synchronous", compression=options)
    exact = simulate(replace(rule, compression=None), objective, Workers(2), epochs=60, batch=16).losses[-1].loss
    fed = simulate(rule, objective, Workers(2), epochs=60, batch=16).losses[-1].loss
    forget = ErrorFeedback.pack

    def without(self, gradient):
        self.left = None
        return forget(self, gradient)

    monkeypatch.setattr(ErrorFeedback, "pack", without)
    starved = simulate(rule, objective, Workers(2), epochs=60, batch=16).losses[-1].loss
    start = objective.loss(objective.start)
    assert fed - exact < 0.1 * (start - exact) < starved - exact
