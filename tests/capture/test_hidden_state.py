"""Python state that a forward reads or changes: a stream gives the plain module's numbers at every call, or refuses."""

from __future__ import annotations

import copy
import cProfile
import gc
import pickle
import random
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from capture import hidden
from capture.hidden import CASES, FIRST, INSIDE, Net, given_by, image, made
from torch import nn

from widefield.capture.program_cache import RECAPTURES_MOST
from widefield.capture.python_state import ARRAY_MOST, MOST, PythonState
from widefield.capture.side_effects import Gone
from widefield.capture.trace import trace
from widefield.streaming.api import stream


def named(name: str):
    return next(case for case in CASES if case.name == name)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # torch's, of a tensor's array
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_call_gives_the_plain_modules_numbers_or_is_refused(case):
    streamed = stream(made(case), tiles=(2, 2))
    if case.refuses:
        with pytest.raises(NotImplementedError, match=case.refuses):
            given_by(streamed, case)
        return
    got = given_by(streamed, case)
    expected = given_by(made(case), case)
    assert len({float(out.sum()) for out in expected}) > 1 or case in FIRST, "what is hidden must show, or nothing is tested"
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_nothing_of_the_capture_is_left_behind():
    """Caches hold real tensors afterwards, what is no cache says that it is gone, and the module's plain run goes on."""
    for case in FIRST:
        if not case.refuses:
            streamed = stream(made(case), tiles=(2, 2))
            given_by(streamed, case)
            assert PythonState([("", streamed), ("", hidden.TABLES), ("", hidden._table)]).fakes == []
            assert (
                gc.get_referents(hidden._table) is not None and not PythonState([("", gc.get_referents(hidden._table))]).fakes
            )
            pickle.loads(pickle.dumps([copy.deepcopy(value) for value in vars(streamed).values() if type(value) is Gone]))


def test_what_a_forward_leaves_in_every_call_says_that_it_is_gone():
    streamed = stream(made(named("features")), tiles=(2, 2))
    loss = streamed(image()).sum()
    words = r"Net.features is a tensor of \[2, 8, 11, 9\] made from its input, .* return it"
    for use in (lambda gone: loss + gone, lambda gone: gone * 2, lambda gone: gone.mean(), torch.stack, float, bool, len, list):
        with pytest.raises(NotImplementedError, match=words):
            use(streamed.features)
    assert not hasattr(streamed.features, "__array__") and "features" in repr(streamed.features)


def test_a_refusal_puts_everything_back():
    for case in INSIDE:
        if case.refuses and "next" not in case.name:  # an iterator has no way back
            streamed, expected = stream(made(case), tiles=(2, 2)), random.getstate()
            before = PythonState([("", streamed)])
            with pytest.raises(NotImplementedError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                streamed(image())
            assert before.holds() and list(before.changes()) == [], case.name
            assert random.getstate() == expected, case.name
            assert sys.getprofile() is None


def test_a_module_that_is_captured_in_every_call_says_why():
    case = named("a number")
    streamed = stream(made(case), tiles=(2, 2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for call in range(RECAPTURES_MOST + 3):
            case.change(streamed, call)
            streamed(image())
    assert [str(warning.message) for warning in said if "captured anew" in str(warning.message)] == [
        f"Net was captured anew in each of its last {RECAPTURES_MOST} calls, since Net.a changed; the numbers are right, but "
        "a capture takes as long as many calls: hold what changes in a buffer, or in a tensor that is a module's attribute"
    ]


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (list(range(MOST + 1)), rf"Net.a and what the forward's .* is more than {MOST} Python values"),
        (np.zeros(ARRAY_MOST // 8 + 1), rf"Net.a is a NumPy array of float64, .*, which is done for up to {ARRAY_MOST} bytes"),
        (np.array([object()]), "Net.a is a NumPy array of object"),
    ],
    ids=["many values", "a large array", "an array of objects"],
)
def test_what_cannot_be_compared_in_every_call_is_refused(held, words):
    streamed = stream(Net(lambda self, y: y, a=held).double(), tiles=(2, 2))
    with pytest.raises(NotImplementedError, match=words):
        streamed(image())


def test_a_chain_of_a_thousand_objects_is_followed_to_its_end():
    last = first = types.SimpleNamespace(scale=1.0, next=None)
    for _ in range(2000):
        last.next = types.SimpleNamespace(scale=1.0, next=None)
        last = last.next
    last.next = first

    def does(self, y):
        return y * last.scale

    streamed = stream(Net(does, a=first).double(), tiles=(2, 2))
    streamed(image())
    last.scale = 3.0
    got = streamed(image())
    torch.testing.assert_close(got, Net.forward(streamed, image()))


def test_arguments_are_known_by_their_names_and_by_what_they_hold():
    class Two(nn.Module):
        def forward(self, x, plus=None, times=None, options=None):
            x = x if plus is None else x + plus
            x = x if times is None else x * times
            return x if options is None else x * options.value()

    plain, streamed, number = Two(), stream(Two(), tiles=(2, 2)), torch.full((1,), 3.0, dtype=torch.float64)
    options = hidden.Schedule()
    for kwargs in ({"plus": number}, {"times": number}, {"options": options}, {"times": 2}, {"times": 2.5}):
        torch.testing.assert_close(streamed(image(), **kwargs), plain(image(), **kwargs))
    for _ in range(3):
        options.history.append(options.history[-1] + 1)
        given = copy.deepcopy(options)
        torch.testing.assert_close(streamed(image(), options=given), plain(image(), options=given))


def test_what_a_forward_writes_to_its_arguments_is_refused():
    class Filling(nn.Module):
        def forward(self, x, found):
            found["mean"] = x.mean()
            return x

    with pytest.raises(NotImplementedError, match=r"its forward writes to what it is given\[0\]\[1\]\['mean'\]"):
        stream(Filling(), tiles=(2, 2))(image(), {"size": 3})


def test_torchs_default_dtype_is_part_of_a_call():
    streamed = stream(Net(lambda self, y: y * torch.zeros(1).element_size()).double(), tiles=(2, 2))
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            torch.testing.assert_close(streamed(image()), Net.forward(streamed, image()))
    finally:
        torch.set_default_dtype(torch.float32)


def counts_collections(phase: str, info: dict) -> None:
    global COLLECTIONS
    COLLECTIONS += 1


COLLECTIONS = 0


def test_what_the_garbage_collector_calls_is_no_part_of_a_forward():
    streamed = stream(Net(lambda self, y: y * (1 + 0 * gc.collect())).double(), tiles=(2, 2))
    gc.callbacks.append(counts_collections)
    try:
        torch.testing.assert_close(streamed(image()), Net.forward(streamed, image()))
    finally:
        gc.callbacks.remove(counts_collections)


@pytest.mark.parametrize("profiler", ["function", "cProfile"])
def test_a_profiler_goes_on_after_a_capture(profiler):
    seen = []
    streamed = stream(made(named("a number")), tiles=(2, 2))
    if profiler == "function":
        sys.setprofile(lambda frame, event, argument: seen.append(frame.f_code.co_name))
        try:
            streamed(image())
            given_by(Net(lambda self, y: y).double(), named("dropout"))
        finally:
            sys.setprofile(None)
    else:
        with cProfile.Profile() as found:
            streamed(image())
            given_by(Net(lambda self, y: y).double(), named("dropout"))
        found.create_stats()
        seen = [name for _, _, name in found.stats]
    assert "given_by" in seen and "_run_tiles" in seen
    streamed.a = 3.0
    streamed(image())


def test_a_known_call_looks_at_no_more_than_flat_lists(monkeypatch):
    """The walk through all that a module holds takes 30 times as long, so it is made for a capture alone."""
    streamed = stream(made(named("a schedule")), tiles=(2, 2))
    for training in (True, False):
        streamed.train(training)(image())
    monkeypatch.setattr(PythonState, "_visit", None)
    for training in (True, False, True):
        streamed.train(training)(image())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("within", [False, True], ids=["as a whole", "within"])
def test_torchscript_is_refused(within):
    script = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double())
    with pytest.raises(NotImplementedError, match=f"{'its part 0' if within else 'it'} is a torch.jit.ScriptModule"):
        stream(nn.Sequential(script) if within else script, tiles=(2, 2))
    with pytest.raises(NotImplementedError, match="cannot be cut into stages: its part 0 is a torch.jit.ScriptModule"):
        trace(nn.Sequential(script), nn.Sequential(script).forward, (image(),), {}, aim="cut into stages")


def test_torchs_cache_of_weights_holds_no_weights_of_a_capture():
    plain = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.Tanh()).double()
    streamed = stream(copy.deepcopy(plain), tiles=(2, 2))
    with nn.utils.parametrize.cached():
        torch.testing.assert_close(streamed(image()), plain(image()))
        torch.testing.assert_close(streamed[0](image()), plain[0](image()))


def test_a_state_knows_what_changed_before_it_was_first_asked():
    layers = nn.ModuleList([nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.ReLU(), nn.ReLU()])
    states = [PythonState([("layer", layer)]) for layer in layers]
    layers[0].weight.requires_grad_(False)
    layers[1].weight.data = layers[1].weight.data.to(memory_format=torch.channels_last)
    layers[2].__class__ = nn.ReLU6
    assert [state.holds() for state in states] == [False, False, False, True]
