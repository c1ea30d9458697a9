"""Kernl's features beside ours: what it published, and what verification saw of an equal here.

Kernl needs a Triton of 2023 and is in no package index, so nothing of it can be timed. kernl.csv
names for each of its features the op of ours, and the part of a case's name that shows the feature
(a regular expression). `captured` in place of an op stands for what is timed as a CUDA graph.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from harness.project.registry import OURS
from harness.results.raw import TIMED

FEATURES = Path(__file__).with_suffix(".csv")
CAPTURED = "captured"
EVENTS = "events:"


def features() -> list[dict[str, str]]:
    with FEATURES.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rows(reports: Iterable[Mapping], measured: Mapping[str, list]) -> Iterator[dict]:
    """The rows of kernl.csv: `cells` of ours with the feature and how many are right.

    status: `present` where all are right, `partly` where one is not (or was timed by events), `not
    yet` where there is none.
    """
    cells = [
        (report["op"], cell["case"], cell["status"])
        for report in reports
        if report["impl"] == OURS
        for cell in report["cells"]
    ]
    graphs = [
        (CAPTURED, row["case"], "events" if (row["reason"] or "").startswith(EVENTS) else "ok")
        for found in measured.values()
        for row in found
        if row["impl"] == OURS and row["status"] in TIMED and row["block"] == 0
    ]
    for feature in features():
        some = [
            status
            for op, case, status in (*cells, *graphs)
            if op == feature["ours"] and _shows(case, feature["part"])
        ]
        passed = some.count("ok")
        state = "not yet" if not some else "present" if passed == len(some) else "partly"
        yield feature | {"cells": len(some), "passed": passed, "status": state}


def _shows(case: str, part: str) -> bool:
    return not part or any(re.fullmatch(part, each) for each in case.split("-"))
