"""Who waited for whom, by the logs: what several rules conclude from."""

from __future__ import annotations

from widefield.diagnosis.evidence import Evidence, Sighting

LOST_PEER = (
    r"Connection closed by peer",
    r"Connection reset by peer",
    r"Broken pipe",
    r"lost another rank, which reported no error",
    r"remote process exited or there was a network error",
)
"""What a rank says when another one's connections close."""
WAITED = (
    r"\[Rank (?P<rank>\d+)\].*Watchdog caught collective operation timeout",
    r"\[rank(?P<rank>\d+)\].*Timed out waiting \d+ms for (?:recv|send) operation to complete",
    r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
    r"[Rr]ank (?P<rank>\d+) failed to pass monitoredBarrier",
)
_AFTERWARDS = (
    "DistNetworkError", "DistBackendError", "DistStoreError", "ChildFailedError", "PeerFailedError", "SignalException",
    "ProcessRaisedException", "ProcessExitedException", "BrokenPipeError", "ConnectionResetError", "KeyboardInterrupt",
    "EOFError",
)  # fmt: skip
_OF_MESSAGES = r"Connection closed by peer|Connection reset|Broken pipe|Timed out waiting|NCCL|gloo|collective|timeout"


def timed_out(evidence: Evidence) -> dict[int, Sighting]:
    """The ranks that waited in vain, with the first line of each; -1 where a line names no rank."""
    found: dict[int, Sighting] = {}
    for seen in evidence.all(*WAITED):
        found.setdefault(-1 if seen.rank is None else seen.rank, seen)
    if len(found) > 1:
        found.pop(-1, None)
    return found


def other_errors(evidence: Evidence) -> Sighting | None:
    """The first error of a rank's own, which is not one of messages between ranks: the last line of a traceback."""
    prefix, afterwards = r"^(?:\[?(?:default|rank) ?\d+\]?:\s*|\d+: )?", "|".join(_AFTERWARDS)
    pattern = rf"{prefix}(?!(?:[\w.]*\.)?(?:{afterwards})\b)[\w.]*(?:Error|Exception)\b: (?!.*(?:{_OF_MESSAGES})).*$"
    killed = (r"exitcode\s*: ?-(?!15)\d+", r"was killed by SIG")
    return evidence.first(pattern, *killed)
