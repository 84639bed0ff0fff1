"""Looks the packages of an environment up among known vulnerabilities: python tests/audit.py SITE_PACKAGES.

pip-audit asks a database over the network.  Without one it fails with a traceback, of which a sentence is made here, and the
status is 3: nothing was audited, and nothing is said to be sound.
"""

from __future__ import annotations

import subprocess
import sys

NOT_AUDITED = 3
UNREACHABLE = (
    "ConnectionError", "ConnectTimeout", "Connection refused", "Name or service not known", "Max retries exceeded",
    "Temporary failure in name resolution", "ServiceError", "ReadTimeout", "HTTPError", "ProxyError", "SSLError",
)  # fmt: skip
"""What a traceback says where the database was not reached."""


def audit(command: list[str]) -> int:
    """Run pip-audit; its status, 0 where nothing is known, 1 where something is; NOT_AUDITED where it could not ask."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and any(word in done.stderr for word in UNREACHABLE):
        reason = done.stderr.strip().splitlines()[-1]
        print(
            f"not audited: the database of vulnerabilities was not reached ({reason[:200]}). Run make audit where there is a "
            "network, or give pip-audit a service that is reached here (PIP_AUDIT_VULNERABILITY_SERVICE)",
            file=sys.stderr,
        )
        return NOT_AUDITED
    print(done.stdout + done.stderr, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(audit([sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--path", sys.argv[1]]))
