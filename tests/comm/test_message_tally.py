"""Are messages between two ranks counted, by rank, and is a step known that took another way?"""

from __future__ import annotations

import torch
from ranks import on_ranks

from widefield.comm.mesh import Mesh
from widefield.comm.message_tally import MessageTally, counted, note
from widefield.comm.point_to_point import exchange, receive, send


def test_messages_are_counted_by_rank_and_compared_with_the_step_before():
    first, second = on_ranks(2, _three_steps)
    sends = "message 1 of this step is a send to rank 1, and was a receive from rank 1 in the step before"
    receives = "message 2 of this step is a receive from rank 0, and was a send to rank 0 in the step before"
    assert first == ({"1": 5}, {"1": 2}, ["", "", sends], 7)
    assert second == ({"0": 2}, {"0": 5}, ["", "", receives], 7)


def _three_steps(mesh: Mesh) -> tuple:
    tally, peer, odd = MessageTally(), 1 - mesh.rank, []
    send_or_receive = send if mesh.rank == 0 else receive
    with counted(tally, of_stages=False):
        for step in range(3):
            tally.begin_step()
            if step < 2:
                for work in exchange({peer: torch.ones(2)}, {peer: torch.ones(2)}, mesh.group):
                    work.wait()
            else:
                for _ in range(3):
                    send_or_receive(torch.ones(1), peer, mesh.group)
            odd.append(tally.odd())
    note("send", mesh.group, peer)  # of nobody that counts
    return tally.by_rank("send"), tally.by_rank("receive"), odd, tally.posted
