"""Who is missing, who owes a message, who is slow: what follows from the reports of all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from widefield.comm.stand import Stand
from widefield.comm.verdict import Debt, Spent, debts, missing, sentence, stragglers, stragglers_in_words

AT = Stand(1, 4, 9, "net.py:3 in forward", True)


def late(found: dict[int, Stand]) -> list[int]:
    return missing(found, ranks=len(found), frozen=[])


@pytest.mark.parametrize(
    ("found", "who"),
    [
        ({0: AT, 1: replace(AT, odd="message 3 of this step is a send to rank 0, and was none")}, [1]),
        ({0: replace(AT, odd="x"), 1: replace(AT, odd="x"), 2: replace(AT, begun=8)}, [0, 1]),
        ({0: replace(AT, odd="x"), 1: replace(AT, odd="x", begun=8)}, [1]),  # all took another way: it tells nothing
        ({0: replace(AT, awaited={"1": 4}), 1: replace(AT, sent={"0": 3}, begun=12)}, [1]),  # ahead, and owes a message
        ({0: replace(AT, awaited={"1": 4}), 1: replace(AT, sent={"0": 4})}, []),
        (  # 0 waits for 1, which waits for 2
            {
                0: replace(AT, awaited={"1": 2}),
                1: replace(AT, sent={"0": 1}, awaited={"2": 5}),
                2: replace(AT, sent={"1": 4}),
            },
            [2],
        ),
        (  # two wait for each other, and a third for none
            {
                0: replace(AT, awaited={"1": 2}, sent={"1": 1}),
                1: replace(AT, awaited={"0": 2}, sent={"0": 1}),
                2: AT,
            },
            [0, 1],
        ),
        ({0: AT, 1: replace(AT, doing="data", begun=8), 2: replace(AT, begun=8)}, [1]),
        ({0: replace(AT, doing="data"), 1: replace(AT, doing="data")}, []),
    ],
)
def test_the_first_rule_that_tells_ranks_apart_names_them(found, who):
    assert late(found) == who


def test_debts_are_counted_pair_by_pair():
    found = {0: replace(AT, awaited={"1": 4, "2": 1}), 1: replace(AT, sent={"0": 3}), 2: replace(AT, sent={"0": 1})}
    assert debts(found) == [Debt(waits=0, owes=1, awaited=4, sent=3)]
    assert str(debts(found)[0]) == "rank 1 has sent rank 0 3 of the 4 messages that it waits for"
    assert debts({0: replace(AT, awaited={"1": 4})}) == []  # rank 1 has not reported


def about(found: dict[int, Stand], **how) -> str:
    return sentence(found, ranks=len(found), frozen=[], seconds=61.2, longest=0.0, **how)


def test_a_sentence_gives_the_evidence_and_what_the_others_wait_in():
    waits = replace(AT, message="all_reduce (Float [3]), number 7 of group 0", awaited={"1": 4})
    text = about({0: waits, 1: replace(AT, sent={"0": 3}, doing="data", begun=3)})
    assert "1 of 2 ranks has not arrived: rank 1 waits for its data at net.py:3 in forward" in text
    assert "(rank 1 has sent rank 0 3 of the 4 messages that it waits for)" in text
    assert "The others wait: rank 0 waits in all_reduce (Float [3]), number 7 of group 0 at net.py:3 in forward" in text
    assert text.endswith("log.stall_seconds sets when to warn")
    odd = about({0: AT, 1: replace(AT, odd="message 3 of this step is a send, and was none in the step before")})
    assert "(message 3 of this step is a send, and was none in the step before)" in odd


def test_a_sentence_that_ends_the_run_says_so():
    text = about({0: AT, 1: replace(AT, begun=8)}, ends=True)
    assert text.startswith("nothing has changed on any rank for 61 s, in step 5. 1 of 2 ranks has not arrived: rank 1 is at")
    assert text.endswith("So the run ends on all ranks; log.hang_seconds sets after how long") and "goes on" not in text
    unknown = about({0: AT, 1: AT}, ends=True)
    assert "No rank is behind the others: rank 0 is at" in unknown and unknown.endswith("sets after how long")


# ---------------------------------------------------------------------------------------------- who is slow


def spent(work: float, message: float, data: float = 0.0) -> Spent:
    return Spent(10, data, work, message)


@pytest.mark.parametrize(
    ("of_ranks", "slow"),
    [
        ([spent(1, 1), spent(2, 0)], [1]),
        ([spent(1, 1), spent(0.1, 0, data=1.9)], [1]),  # slow for its disk
        ([spent(1, 0.4), spent(1.4, 0)], []),  # less than SLOWER
        ([spent(1, 0.01), spent(2, 0)], []),  # nobody waits for it
        ([spent(1, 1), spent(1, 1), spent(1, 1), spent(2, 0)], [3]),
        ([spent(1, 1), spent(1, 1), spent(2, 0), spent(2, 0)], [2, 3]),
        ([spent(1, 1)], []),
    ],
)
def test_a_rank_is_slow_where_the_others_wait_for_it(of_ranks, slow):
    assert stragglers(dict(enumerate(of_ranks))) == slow


def test_the_words_give_the_slowness():
    text = stragglers_in_words({0: spent(0.2, 0.6), 1: spent(0.7, 0.05, data=0.1)}, [1])
    assert text.startswith(
        "rank 1 is slow: a step takes it 0.8 s (0.1 s for data, 0.7 s at work); the others 0.2 s, and they wait"
    )
    assert "wait 75 % of their time. Seen over 10 steps" in text
