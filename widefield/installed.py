"""Which version of a package is installed?"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str, *, otherwise: str = "not installed") -> str:
    """The version of a package; `otherwise` where it has none, as a checkout that is run without having been installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise
