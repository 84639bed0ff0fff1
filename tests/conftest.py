"""What every test module shares: the ranks end with the session, and a busy machine is no failure of a property."""

import signal
from collections.abc import Iterator

import devices
import pytest
import ranks
import torch
from hypothesis import settings
from slow_cases import slow_cases, unknown, without_quick_case

settings.register_profile("widefield", deadline=None)
settings.load_profile("widefield")


def pytest_configure() -> None:
    """Hear Ctrl-C, which a shell makes its background jobs ignore: tests send it, and what they start inherits this."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    ranks.end_idle()


SLOW = slow_cases()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid in SLOW:
        item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a test and its ranks run: "cpu", and once more on "cuda" where it is marked `on_gpu_too`.

    A test without the mark `gpu` sees no GPU, so that it does the same on every machine.
    """
    kind = getattr(request, "param", "cpu")
    devices.CURRENT.append(kind)
    around = (
        devices.without_gpus() if request.node.get_closest_marker("gpu") is None else devices.running_on(torch.device(kind))
    )
    try:
        with around:
            yield kind
    finally:
        devices.CURRENT.pop()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # all tests are here
        if gone := unknown(SLOW, {item.nodeid for item in items}):
            raise pytest.UsageError(f"tests/slow_cases.txt lists cases that are not there; take them out: {', '.join(gone)}")
        quick = {one.nodeid for one in items if not one.get_closest_marker("long") and not one.get_closest_marker("gpu")}
        if emptied := without_quick_case(SLOW, quick):
            raise pytest.UsageError(f"tests/slow_cases.txt leaves no quick case of {', '.join(emptied)}; take one out of it")
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    left_out = [item for item in of_gpu if _stays_on_the_cpu(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in of_gpu:
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


def _stays_on_the_cpu(item: pytest.Item) -> bool:
    """A case that is long anywhere does, also of a test that is long on the CPU alone."""
    long = any(not mark.kwargs.get("on_gpu") for mark in item.iter_markers("long"))
    return long or item.get_closest_marker("cpu") is not None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed", "skipped") for report in terminalreporter.getreports(kind)]
    of_gpu = [report for report in reports if "gpu" in report.keywords and (report.when == "call" or report.skipped)]
    ran = sum(not report.skipped for report in of_gpu)
    terminalreporter.write_line(f"GPU tests: {ran} of {len(of_gpu)} ran")


def pytest_sessionfinish() -> None:
    ranks.close_all()
