"""What runs on the whole is told with its place and its bytes, the largest first, with a total."""

from __future__ import annotations

import pytest

from widefield.fallback import MEANINGS, Fallback, by_kind, by_size, in_words

MIB = 2**20


def attention(size: int, count: int = 1) -> Fallback:
    return Fallback("run whole", "decoder.up2.attention", "bmm", size, "no file in ops/ has a rule for it", count)


def test_a_place_is_named_with_its_bytes_and_its_reason():
    assert str(attention(3 * MIB)) == "decoder.up2.attention's bmm (3.0 MiB): no file in ops/ has a rule for it"
    assert str(Fallback("drawn whole", "", "bernoulli_", 40)) == "the model's bernoulli_ (40 bytes)"
    assert str(attention(2**11, 2)) == "decoder.up2.attention's bmm (2 KiB, 2 times): no file in ops/ has a rule for it"


def test_equal_places_are_one_and_the_largest_comes_first():
    small, other = attention(5), Fallback("run whole", "stem", "amax", 7)
    assert by_size([small, other, small]) == [attention(10, 2), other]
    assert by_size([small, other]) == [other, small]
    assert by_size([small, Fallback("run whole", "decoder.up2.attention", "bmm", 5, "another reason")])[0] == small


def test_kinds_are_told_in_one_order_each_with_its_total():
    draws = [Fallback("drawn whole", f"drop{n}", "bernoulli_", MIB) for n in range(2)]
    assert in_words([*draws, attention(MIB), Fallback("run whole", "stem", "amax", 2 * MIB, "it has equals")]) == [
        "run whole: 2 operations, 3.0 MiB in all, on the whole image at once",
        "run whole: stem's amax (2.0 MiB): it has equals",
        "run whole: decoder.up2.attention's bmm (1.0 MiB): no file in ops/ has a rule for it",
        "drawn whole: 2 operations, 2.0 MiB in all, random numbers for the whole, as one device draws them: "
        "drop0's bernoulli_ (1.0 MiB), drop1's bernoulli_ (1.0 MiB)",
    ]
    assert in_words([]) == []


@pytest.mark.parametrize("why", ["", "a reason"])
def test_what_is_beyond_the_largest_is_counted(why):
    many = [Fallback("gathered", f"layer{n}", "relu", n * 2**10, why) for n in range(1, 8)]
    told = " ".join(in_words(many, most=2))
    assert "gathered: 7 operations, 28 KiB in all" in told and "5 more (15 KiB)" in told
    assert "layer7" in told and "layer6" in told and "layer5" not in told


def test_every_kind_says_what_it_means():
    found = by_kind(Fallback(kind, "", "op", 1) for kind in MEANINGS)
    assert list(found) == list(MEANINGS) and all(len(rows) == 1 for rows in found.values())
