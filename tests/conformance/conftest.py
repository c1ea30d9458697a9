"""Print at the end how many calls of each suite passed, and why others were declined."""

import json
from collections import Counter

import pytest
import torch
from conformance import PROPERTY, Tally


@pytest.fixture(autouse=True)
def _same_samples():
    """PyTorch draws its samples from a generator that all tests share."""
    torch.manual_seed(37)


@pytest.fixture
def tally(record_property, request):
    """Count the calls of a test; the test fails if a call is wrong or if all are declined."""
    found = Tally()
    yield found
    told = {"passed": found.passed, "declined": dict(found.declined)}
    # A property of the report travels from the processes of xdist to the one that prints.
    record_property(PROPERTY, json.dumps({"suite": request.node.name} | told))
    assert not found.wrong, "\n".join(found.wrong[:20])
    assert found.passed or found.none, f"all declined: {dict(found.declined)}"


def pytest_terminal_summary(terminalreporter):
    suites, reasons = [], Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY and report.when == "teardown":
                    suites.append(json.loads(value))
    for suite in suites:
        reasons.update(suite["declined"])
    if suites:
        passed = sum(suite["passed"] for suite in suites)
        terminalreporter.section("conformance")
        terminalreporter.line(f"{passed} calls passed, {reasons.total()} declined:")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"  {count:5d}  {reason}")
