"""What every test module shares: the ranks end with the session."""

import ranks


def pytest_sessionfinish() -> None:
    ranks.close_all()
