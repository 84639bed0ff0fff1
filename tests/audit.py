"""Looks the packages of an environment up among known vulnerabilities: python tests/audit.py SITE_PACKAGES.

pip-audit asks a database over the network.  Where that is not reached it ends with a traceback; where a mirror without a
database answers, it leaves out every package and finds nothing, with the status 0.  Both are told in a sentence here, with the
status 3: nothing was audited, and nothing is said to be sound.
"""

from __future__ import annotations

import json
import subprocess
import sys

NOT_AUDITED = 3
OWN = "widefield"
"""Is not published under this version, and not looked up."""


def audit(command: list[str]) -> int:
    """Run pip-audit, whose standard output is its JSON; 0 where nothing is known, 1 where something is, else NOT_AUDITED."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        lines = done.stderr.strip().splitlines()
        return _not_audited(f"pip-audit ended with {done.returncode}: {lines[-1][:200] if lines else 'no word'}")
    others = [one for one in packages if one["name"] != OWN]
    left_out = [one["name"] for one in others if "skip_reason" in one]
    if others and len(left_out) == len(others):
        return _not_audited(f"it knows none of {len(others)} packages")
    found = [one for one in others if one.get("vulns")]
    for one in found:
        for known in one["vulns"]:
            mended = ", ".join(known.get("fix_versions", [])) or "no version yet"
            print(f"{one['name']} {one['version']}: {known['id']}; mended in {mended}")
    print(
        f"{len(others) - len(left_out)} of {len(others)} packages were looked up, and {len(found)} have known vulnerabilities"
    )
    if left_out:
        print(f"not looked up, as the database does not know them: {', '.join(left_out)}")
    return 1 if found else 0


def _not_audited(reason: str) -> int:
    print(
        f"not audited: the database of vulnerabilities was not reached ({reason}). Run make audit where there is a network, or "
        "name a service that is reached here (pip-audit --vulnerability-service)",
        file=sys.stderr,
    )
    return NOT_AUDITED


if __name__ == "__main__":
    sys.exit(audit([sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--format", "json", "--path", sys.argv[1]]))
