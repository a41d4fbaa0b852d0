"""The example modules of the sources, as programs for kprobefs's API: they print what happened."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROBES = Path(__file__).resolve().parents[2] / "examples" / "probes"
EXPECTED = {
    "kprobe_example.py": r"""planted at 0x\w+
pre_handler: int_sqrt, ip = 0x\w+, flags = 0x\w+
post_handler: int_sqrt, ip = 0x\w+, flags = 0x\w+
the root of 144 is 12
unregistered; 0 hits missed
""",
    "jprobe_example.py": r"""planted at 0x\w+
jprobe: a = 12, b = 18
gcd\(12, 18\) = 6
unregistered
""",
    "kretprobe_example.py": r"""planted at 0x\w+
int_sqrt returned 12 and took \d+ ns of the guest's time
unregistered; 0 instances missed
""",
    "assembly_example.py": r"""roots \[9, 12, 3\], by ftrace
3 hits, the largest argument 144
""",
    "djprobe_example.py": r"""int_sqrt: a region of \d+ bytes, boosted before the commit
strlen: a region of \d+ bytes, boosted before the commit
int_sqrt: optimized after it
strlen: optimized after it
hits: int_sqrt, strlen
bytes of text that differ: 0
""",
}


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs an example in this process, which has imported the library.

    The function takes the example's name and arguments, and returns the output.
    """

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(PROBES / name), run_name="__main__")
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


def test_all_of_them_are_tried() -> None:
    assert {path.name for path in PROBES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_prints_what_happened(name: str, printed: Callable[..., str]) -> None:
    assert re.fullmatch(EXPECTED[name], printed(name))


@pytest.mark.parametrize("arch", ["i386", "riscv64"])
def test_assembly_of_another_architecture(arch: str, printed: Callable[..., str]) -> None:
    assert re.fullmatch(EXPECTED["assembly_example.py"], printed("assembly_example.py", "--arch", arch))


def test_another_function_s_returns(printed: Callable[..., str]) -> None:
    assert "strlen returned 6 and took " in printed("kretprobe_example.py", "strlen")
