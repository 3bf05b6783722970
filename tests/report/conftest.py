"""Certificates to report on: an honest kernel, a rejected one, small and made once a session."""

from __future__ import annotations

import datetime

import pytest

from flashcheck.certify import certify
from flashcheck.kernel import Kernel
from flashcheck.plan import make_plan
from flashcheck.report.build import certificate_of
from flashcheck.report.certificate import Certificate
from tests.interface import subjects


def made(kernel: Kernel, name: str, max_cases: int | None = None, seed: int = 20260) -> Certificate:
    """A certificate of a subject at level quick."""
    plan = make_plan(kernel, "quick", max_cases=max_cases, seed=seed)
    started = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    load_name = f"tests.interface.subjects:{name}"
    command = f"flashcheck certify {load_name} --level quick"
    return certificate_of(kernel, certify(kernel, plan), "cpu", command, started, load_name)


@pytest.fixture(scope="session")
def honest() -> Certificate:
    return made(subjects.honest, "honest")


@pytest.fixture(scope="session")
def rejected() -> Certificate:
    """One finding: the LSE is in base 2."""
    return made(subjects.wrong_lse, "wrong_lse")


@pytest.fixture(scope="session")
def infinite() -> Certificate:
    """Every output is NaN: margins are inf, errors NaN."""
    return made(subjects.nan, "nan", max_cases=6)
