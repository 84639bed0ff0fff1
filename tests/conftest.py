"""What every test module shares: the ranks end with the session, and a busy machine is no failure of a property."""

import ranks
from hypothesis import settings

settings.register_profile("widefield", deadline=None)
settings.load_profile("widefield")


def pytest_sessionfinish() -> None:
    ranks.close_all()
