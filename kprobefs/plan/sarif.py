"""Findings of `kprobefs check` as a SARIF 2.1.0 log, which code hosts show next to the lines.

Source: "Static Analysis Results Interchange Format (SARIF) Version 2.1.0", OASIS, 2020.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from emulated_kernel.trace.text.probe_errors import ProbeError
from kprobefs import __version__
from kprobefs.plan.answer import WARNINGS, Finding

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif_log(results: Iterable[tuple[str, str, Finding, tuple[int, int | None]]]) -> dict[str, Any]:
    """Return a SARIF log as a dictionary for JSON.

    Each result is a tuple: path of the file, name of the kernel, finding, and (line, column) of the finding
    in the file. Both count from 1; the column is None if it is unknown or the whole line is meant.
    """
    listed = list(results)
    rules = sorted({finding.rule for _, _, finding, _ in listed})
    numbers = {rule: number for number, rule in enumerate(rules)}
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "kprobefs",
                        "version": __version__,
                        "rules": [_rule(rule) for rule in rules],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [
                    {
                        "ruleId": finding.rule,
                        "ruleIndex": numbers[finding.rule],
                        "level": "error" if finding.is_error else "warning",
                        "message": {"text": f"{kernel}: {finding.message}"},
                        "locations": [_location(file, *place)],
                    }
                    for file, kernel, finding, place in listed
                ],
            }
        ],
    }


def _rule(name: str) -> dict[str, Any]:
    if name in WARNINGS:
        text = WARNINGS[name]
    elif name in ProbeError.__members__:
        text = ProbeError[name].texts[0]
    else:
        text = f"The kernel refuses the line with {name}."
    return {"id": name, "shortDescription": {"text": text}}


def _location(file: str, line: int, column: int | None) -> dict[str, Any]:
    region = {"startLine": line} | ({} if column is None else {"startColumn": column})
    uri = quote(file.encode("utf-8", "surrogateescape"))
    return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}
