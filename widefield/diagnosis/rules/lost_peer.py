"""A rank lost its connection to another."""

from __future__ import annotations

TITLE = "a rank lost its connection to another that had ended"
KIND = "consequence"
PATTERNS = (
    r"Connection closed by peer",
    r"Connection reset by peer",
    r"lost another rank, which reported no error",
    r"remote process exited or there was a network error",
    r"NCCL WARN .*Connection closed by remote peer",
    r"Broken pipe",
)
CAUSE = "Its peer ended first, and its sockets closed. That one's log has the reason; a killed one has none."
REMEDY = "See which rank ended first: its exit code in the launcher's summary (-9: killed, -11: crashed), then its log."
SOURCE = "gloo, transport/tcp/pair.cc"

CASES: list[tuple[str, str | None]] = [
    (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711",
        "pair.cc",
    ),
    ("connection to the store opened", None),
]
