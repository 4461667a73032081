"""Makes failures of skips: ``MQ_NEED=browser,root`` where a run must have both."""

from __future__ import annotations

import os
import re
from collections.abc import Generator

import pytest

NEEDS = {
    "browser": "there is no browser",
    "cgroup": "no memory cgroup",
    "gpu": "sees no CUDA device|no CUDA device|no GPU",
    "ipv6": "no IPv6",
    "memory": "MiB of memory",
    "namespace": "no (mount|network|time) namespace|no unshare",
    "root": "only root",
}
"""What may be asked for, and how the reasons of the tests that lack it read."""


def _needed() -> list[str]:
    return [need for need in os.environ.get("MQ_NEED", "").split(",") if need]


def pytest_configure() -> None:
    unknown = ", ".join(need for need in _needed() if need not in NEEDS)
    if unknown:
        known = ", ".join(NEEDS)
        raise pytest.UsageError(f"MQ_NEED has {unknown}; what it knows: {known}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[
    None, pytest.TestReport, pytest.TestReport
]:
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        for need in _needed():
            if re.search(NEEDS[need], reason):
                report.outcome = "failed"
                report.longrepr = f"MQ_NEED asks for {need}. {reason}"
    return report
