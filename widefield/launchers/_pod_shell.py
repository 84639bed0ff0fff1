"""What a pod with several ranks runs: torchrun, in a shell that ends with the status of the ranks.

torchrun ends with 1 whatever its ranks end with, and Kubernetes judges by the status of the container.  So each rank writes
its own into a file of the pod (cli/__init__.py), and the shell ends with that: TO_BE_CONTINUED where the run was asked to stop,
REFUSED where the user has to change something.  The shell is the pod's first process, to which Kubernetes sends SIGTERM; it
hands it on, and waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from widefield.refusal import REFUSED, STATUSES, TO_BE_CONTINUED

PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""The variable with the seconds that torchrun gives ranks after SIGTERM; an old torch does not read it, and gives 30."""
FILE = "/dev/shm/widefield-statuses"
SCRIPT = f"""\
export {STATUSES}="${{{STATUSES}:-{FILE}}}"
: > "${STATUSES}"
ranks= asked= status=127 again=yes
trap 'again=yes; if [ "$ranks" ]; then kill -TERM $ranks; else asked=yes; fi' TERM INT
"$@" &
ranks=$!
[ -z "$asked" ] || kill -TERM $ranks
while [ "$again" ]; do  # a signal ends the wait, and not torchrun
  again=
  wait $ranks
  ended=$?
  [ $ended = 127 ] || status=$ended
done
if [ $status != 0 ]; then
  for one in {REFUSED} {TO_BE_CONTINUED}; do
    if grep -qx $one "${STATUSES}"; then status=$one; fi
  done
fi
exit $status
"""


def with_status_of_ranks(words: Sequence[str]) -> list[str]:
    """A command in that shell."""
    return ["sh", "-c", SCRIPT, "sh", *words]


def patience(grace: int) -> int:
    """Seconds for ranks to save, of `grace` seconds in all; what is left is for torchrun and the shell to end."""
    return max(grace - 20, grace // 2, 1)
