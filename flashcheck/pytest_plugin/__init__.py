"""pytest plugin: one test per kernel, check and dtype; a ``certify`` fixture; a line per kernel and dtype.

It is loaded in every pytest run of everyone who installed flashcheck, so it imports nothing heavy: torch
and the rest come in when a test asks for them.

Files to know: ``options`` (the command line), ``decorator`` (``parametrize_with_checks``), ``cases`` (one
test), ``judge`` (runs each kernel and dtype once, whichever worker comes first), ``known`` (expected
failures), ``summary``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from flashcheck.pytest_plugin.options import add_options
from flashcheck.pytest_plugin.session import Session

if TYPE_CHECKING:
    from flashcheck.report.certificate import Certificate

KERNELS_MARK = "flashcheck_kernels"
_SESSION = pytest.StashKey[Session]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{KERNELS_MARK}(kernels): set by flashcheck.parametrize_with_checks")
    config.addinivalue_line("markers", "flashcheck: a test that judges a kernel; deselect with -m")
    config.stash[_SESSION] = Session(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist's controller tells every worker where results are shared."""
    node.workerinput["flashcheck_folder"] = str(node.config.stash[_SESSION].folder)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker(KERNELS_MARK)
    if mark is None:
        return
    from flashcheck.pytest_plugin.cases import parameters

    session = metafunc.config.stash[_SESSION]
    place = metafunc.definition.nodeid
    metafunc.parametrize(("kernel", "check"), parameters(session, place, *mark.args, **mark.kwargs))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    session = config.stash[_SESSION]
    if session.used and session.options.known_failures is not None:
        from flashcheck.pytest_plugin.known import mark_known_failures

        mark_known_failures(session.options.known_failures, items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Judges the test's group first: a fault of the judge is an error, not a failure."""
    case = case_of(item)
    if case is not None:
        item.user_properties += case.prepare()


def case_of(item: pytest.Item) -> Any:
    """The ``Case`` of a generated test; None for any other."""
    callspec = getattr(item, "callspec", None)
    check = callspec.params.get("check") if callspec is not None else None
    return check if getattr(check, "is_flashcheck_case", False) else None


@pytest.fixture
def certify(request: pytest.FixtureRequest) -> Callable[..., Certificate]:
    """``certify(kernel, dtype=..., level=..., max_cases=...)``: the certificate; the test fails where it is
    not certified. ``complete=False`` accepts that something declared was not judged."""
    from flashcheck.pytest_plugin.cases import certify_in_test

    session = request.config.stash[_SESSION]

    def run(kernel: Any, **narrowing: Any) -> Certificate:
        __tracebackhide__ = True
        return certify_in_test(session, kernel, **narrowing)

    return run


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = config.stash[_SESSION]
    if session.folder.is_dir():
        from flashcheck.pytest_plugin.summary import write_reports, write_summary

        write_summary(terminalreporter, session.folder)
        if session.options.report is not None:
            write_reports(terminalreporter, session.folder, session.options.report)


def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.stash.get(_SESSION, None)
    if session is not None and not session.is_worker:
        shutil.rmtree(session.folder, ignore_errors=True)
