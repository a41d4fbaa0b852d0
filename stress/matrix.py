"""Run a script on several distributions' kernels by `kprobefs matrix`: python -m stress.matrix IMAGE...

The script passes on Linux 6.5 and later, because it needs the file touched_functions. The program prints the
table, and ends with status 1 if the command's table, JSON and JUnit report do not agree with the releases.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

SCRIPT = """\
#!/bin/sh
set -e
cd "$KPROBEFS"
echo 'p:opened do_sys_openat2' > kprobe_events
echo 1 > tracing/events/kprobes/opened/enable
echo hello > scratch/file
grep -q opened tracing/trace || { echo "error: no record"; exit 1; }
test -e tracing/touched_functions || { echo "error: no touched_functions"; exit 4; }
"""
NEEDED = (6, 5)
"""First version of Linux with touched_functions."""


def wrong(found: Sequence[dict[str, object]], report: Path) -> list[str]:
    """Return the kernels whose result is not that of their release, or differs from the JUnit report."""
    cases = {case.get("name"): case for case in ElementTree.parse(report).getroot().iter("testcase")}
    names = []
    for each in found:
        name = str(each["kernel"])
        version = tuple(map(int, re.findall(r"\d+", name)[:2]))
        status, line = (0, "") if version >= NEEDED else (4, "error: no touched_functions")
        failure = cases[name].find("failure")
        is_reported = (failure is None) == (status == 0)
        if (each["status"], each["line"]) != (status, line) or not is_reported:
            names.append(name)
    return names


def main() -> int:
    """Run the matrix twice, for the table and for JSON; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m stress.matrix", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="number of kernels at a time")
    parser.add_argument("images", metavar="IMAGE", type=Path, nargs="+")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kprobefs-matrix-") as place:
        (Path(place) / "script.sh").write_text(SCRIPT)
        images = [word for image in options.images for word in ("--image", str(image.absolute()))]
        words = ["matrix", *images, "--jobs", str(options.jobs), "--junit", "report.xml"]
        runs = [
            subprocess.run(
                [sys.executable, "-m", "kprobefs", *words, *more, "--", "sh", "script.sh"],
                cwd=place,
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            for more in ((), ("--json",))
        ]
        print(runs[0].stdout, end="")
        found = json.loads(runs[1].stdout)
        names = wrong(found, Path(place) / "report.xml")
    is_any_failed = any(each["status"] for each in found)
    for name in names:
        print(f"wrong: {name}")
    return 1 if names or any(run.returncode != is_any_failed for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
