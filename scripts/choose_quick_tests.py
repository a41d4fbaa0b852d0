"""Choose the modules of tests/quick.txt from the durations of a run.

Run the suite as an ordinary user who has neither /dev/fuse nor a compiler, with `--junitxml=REPORT`; then run
`python scripts/choose_quick_tests.py REPORT`. Modules in which a test was skipped or failed are left out.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 50.0
"""Maximum total time in seconds of all chosen tests in one process."""
IMPORT = 0.05
"""Time in seconds that a module takes in addition to its tests."""


def durations(report: Path) -> dict[str, tuple[float, int]]:
    """Return a map module -> seconds and number of its tests, for modules in which all tests passed."""
    seconds = defaultdict[str, float](float)
    counts = defaultdict[str, int](int)
    excluded = set()
    for case in ElementTree.parse(report).iter("testcase"):
        module = module_of(case.attrib["classname"])
        if module is None:
            continue
        seconds[module] += float(case.attrib["time"])
        counts[module] += 1
        if any(child.tag in {"skipped", "failure", "error"} for child in case):
            excluded.add(module)
    return {module: (seconds[module], counts[module]) for module in seconds if module not in excluded}


def module_of(name: str) -> str | None:
    """Return the path of a test's module from its `classname`, or None if there is no such file."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = Path(*parts[:length]).with_suffix(".py")
        if (ROOT / path).is_file():
            return str(path)
    return None


def chosen(found: dict[str, tuple[float, int]], budget: float) -> list[str]:
    """Return the modules with the most tests per second that fit into the budget."""
    left = budget
    modules = []
    for module, (seconds, _) in sorted(found.items(), key=lambda each: (each[1][0] + IMPORT) / each[1][1]):
        if seconds + IMPORT <= left:
            left -= seconds + IMPORT
            modules.append(module)
    return sorted(modules)


def main() -> None:
    """Write tests/quick.txt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("report", type=Path, help="report of pytest --junitxml")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds (default: %(default)s)")
    options = parser.parse_args()
    found = durations(options.report)
    modules = chosen(found, options.budget)
    (ROOT / "tests/quick.txt").write_text("".join(f"{module}\n" for module in modules), encoding="ascii")
    tests = sum(found[module][1] for module in modules)
    seconds = sum(found[module][0] for module in modules)
    print(f"{len(modules)} of {len(found)} modules, {tests} tests, {seconds:.1f} s")


if __name__ == "__main__":
    main()
