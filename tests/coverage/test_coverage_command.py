"""Outputs of `kprobefs coverage`: the results of processes, patterns, comparisons, pages and pictures
agree.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from emulated_kernel.image.kallsyms import Kallsyms, Symbol
from kprobefs.cli.main import main
from kprobefs.measure.coverage import FunctionCounter, coverage
from kprobefs.measure.coverage_subject import Subject, own_image
from tests.coverage.test_coverage import VERDICTS, adds_up, counted, linux, refused

PATTERN = "vfs_*"
SVG = "{http://www.w3.org/2000/svg}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


# Processes


def test_processes_count_what_one_process_counts() -> None:
    alone = coverage([own_image("x86_64")], None, None, 1)
    shared = coverage([own_image("x86_64")], None, None, 3)
    assert [each.symbols for each in alone] == [each.symbols for each in shared]


def test_code_that_does_not_differ_is_examined_once() -> None:
    group = [own_image("x86_64").of_functions(PATTERN)] * 2
    one, two = coverage(group, None)
    assert one.symbols == two.symbols
    assert one.seconds > 0
    assert two.seconds == 0
    first, second = coverage(group, None, "extended")
    assert first.symbols == second.symbols
    assert second.seconds > 0


def test_a_process_that_is_killed_is_an_error_not_a_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = os.getpid()
    count = FunctionCounter.count_piece

    def killed(self: FunctionCounter, number: int) -> Any:
        if os.getpid() != parent:
            os._exit(1)
        return count(self, number)

    monkeypatch.setattr(FunctionCounter, "count_piece", killed)
    assert main(["coverage", "--jobs", "2"]) == 1
    assert "--jobs 1" in capsys.readouterr().err


# Patterns and comparisons


def test_a_pattern_selects_functions(capsys: pytest.CaptureFixture[str]) -> None:
    (every,) = counted(capsys)
    (found,) = counted(capsys, "--function", PATTERN)
    assert adds_up(found)
    selected = [each for each in every["symbols"] if each["name"].startswith("vfs_")]
    assert len(selected) > 5
    assert found["symbols"] == selected
    assert "no such function" in refused(capsys, "--function", "nothing_*")
    assert "similar names: vfs_read" in refused(capsys, "--function", "vfs_raed")


def test_the_text_has_the_number_of_functions(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = counted(capsys, "--function", PATTERN)
    assert main(["coverage", "--function", PATTERN]) == 0
    with_jumps = sum(each["verdicts"]["optimized"] > 0 for each in found["symbols"])
    text = f"{with_jumps} of {found['functions']} functions have an optimized instruction"
    assert text in capsys.readouterr().out.splitlines()


OWN = "with --kprobes kprobefs, the default; this kernel's own kprobes "
ENTRIES = "refuse function entries, which are ftrace sites"


@pytest.mark.parametrize(
    ("arch", "names", "profile", "remarks"),
    [
        ("riscv64", [], "riscv-optprobes-2023", [f"{OWN}have no jumps and {ENTRIES}"]),
        ("riscv64", ["kprobe_ftrace_handler"], "riscv-optprobes-2023", [f"{OWN}have no jumps"]),
        ("riscv64", [], "linux-6.1", [f"{OWN}{ENTRIES}"]),
        ("riscv64", ["kprobe_ftrace_handler"], "linux-6.1", []),
        ("arm64", [], "arm64-6.12", [f"{OWN}have no jumps"]),
        ("arm64", ["arch_prepare_optimized_kprobe"], "arm64-6.12", []),
        ("x86_64", ["kprobe_ftrace_handler"], "linux-6.1", []),
        # kprobefs's own kernel.
        ("riscv64", ["__guest_abi"], "riscv-optprobes-2023", []),
    ],
)
def test_it_is_told_where_the_kernels_own_kprobes_differ(
    arch: str, names: list[str], profile: str, remarks: list[str]
) -> None:
    symbols = [Symbol(name, 16 * at, "T", 16) for at, name in enumerate(["f", "register_kprobe", *names], 1)]
    tables: Any = SimpleNamespace(kallsyms=Kallsyms(symbols), mcount=[16], text_ranges=[])
    has_jumps = arch.startswith(profile[:5])
    subject = Subject("", arch, tables)
    own = subject.own_kprobes(has_jumps=has_jumps)
    assert [own] * bool(own) == remarks


def test_kernels_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = linux(tmp_path)
    kernels = counted(capsys, "--image", file, "--image", file)
    assert len(kernels) == 4
    assert main(["coverage", "--image", file, "--image", file, "--compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (optimized,) = (line for line in lines if line.startswith("optimized  "))
    shares = re.findall(r"[\d.]+ %|-", optimized)
    assert len(shares) == 4
    assert shares[:2] == shares[2:]
    (functions,) = (line for line in lines if line.startswith("functions "))
    assert functions.split()[1:] == [f"{each['functions']:,}" for each in kernels]
    (row,) = (line for line in lines if line.startswith("vfs_read "))
    symbols = [{symbol["name"]: symbol for symbol in each["symbols"]} for each in kernels]
    numbers = [each["vfs_read"]["verdicts"]["optimized"] for each in symbols]
    assert row.split()[1:] == [str(number) for number in numbers]
    assert len(set(numbers)) == 2


@pytest.mark.parametrize("count", [1, 3, 4])
def test_lines_have_at_most_80_columns(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each image has two columns in the table.

    Columns that do not fit into 80 characters are on further lines, and no column is lost.
    """
    file = linux(tmp_path)
    images = ["--image", file] * count
    assert main(["coverage", *images]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert main(["coverage", *images, "--compare"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    shares = out.partition("\noptimized  ")[2].partition("\nbreakpoint")[0]
    assert len(re.findall(r"[\d.]+ %|-", shares)) == 2 * count


def test_functions_that_one_kernel_lacks_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["coverage", "--image", linux(tmp_path), "--compare", "--function", "vfs_*"]) == 0
    assert "vfs_read" in capsys.readouterr().out


# Pages


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pages")
    assert main(["coverage", "--function", PATTERN, "--html", str(directory)]) == 0
    return directory


def rows(page: Path) -> list[list[str]]:
    """Return the cells of the rows in the body of a page's table, without markup."""
    (body,) = re.findall("<tbody>(.*)</tbody>", page.read_text(), re.DOTALL)
    return [
        [re.sub("<[^>]*>", "", cell) for cell in re.findall("<td[^>]*>(.*?)</td>", row, re.DOTALL)]
        for row in re.findall("<tr>(.*?)</tr>", body, re.DOTALL)
    ]


def test_the_index_has_the_counts(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = counted(capsys, "--function", PATTERN)
    shown = rows(pages / "index.html")
    assert [row[0] for row in shown] == [each["name"] for each in found["symbols"]]
    for row, each in zip(shown, found["symbols"], strict=True):
        verdicts = each["verdicts"]
        assert row[2:7] == [f"{verdicts[key]:,}" for key in ("instructions", *VERDICTS)]


def test_each_page_lists_each_instruction(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = counted(capsys, "--function", PATTERN)
    links = re.findall('<tr><td><a href="([^"]*)"', (pages / "index.html").read_text())
    assert {path.name for path in pages.iterdir()} == {"index.html", *links}
    for link, each in zip(links, found["symbols"], strict=True):
        listed = rows(pages / link)
        outcomes = [row[3] for row in listed]
        assert {key: outcomes.count(key) for key in VERDICTS} == {
            key: each["verdicts"][key] for key in VERDICTS
        }
        assert all(row[2] and bytes.fromhex(row[1]) for row in listed)
        assert all(bool(row[4]) == (row[3] != "optimized") for row in listed)


def test_several_kernels_have_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made"
    made.mkdir()
    assert main(["coverage", "--image", linux(made), "--html", str(tmp_path / "html")]) == 0
    assert capsys.readouterr().out == ""
    links = re.findall('href="([^"]*)"', (tmp_path / "html" / "index.html").read_text())
    assert links == ["1/index.html", "2/index.html"]
    assert all((tmp_path / "html" / link).exists() for link in links)


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["coverage", "--function", PATTERN, "--html", str(tmp_path / "file")]) == 1
    assert main(["coverage", "--function", PATTERN, "--plot", str(tmp_path)]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "not a directory" in first
    assert str(tmp_path) in second


def test_a_picture_has_the_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    (found,) = counted(capsys, "--function", PATTERN)
    assert main(["coverage", "--function", PATTERN, "--plot", str(plot)]) == 0
    parts = [
        each for each in ElementTree.parse(plot).iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None
    ]
    widths = [float(part.attrib["width"]) for part in parts]
    total = found["verdicts"]["instructions"]
    expected = [found["verdicts"][key] / total for key in VERDICTS]
    assert [width / sum(widths) for width in widths] == pytest.approx(expected, abs=0.001)


# In a browser


class Browser:
    """A headless Chromium that is driven through pipes."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()

        def give_pipes() -> None:
            # The numbers that --remote-debugging-pipe uses; the originals may be these very numbers.
            high = [os.dup(to_browser), os.dup(from_browser)]
            while any(each < 10 for each in high):
                high = [os.dup(each) for each in high]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]
        self._process = subprocess.Popen(
            [CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=give_pipes,  # noqa: PLW1509 - the browser wants fixed numbers
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._buffer = b""

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        with suppress(BrokenPipeError):
            os.write(self._commands, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
        raise EOFError(f"the browser ended before it answered {method}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" not in self._buffer:
                data = os.read(self._answers, 1 << 16)
                if not data:
                    return
                self._buffer += data
            text, _, self._buffer = self._buffer.partition(b"\0")
            yield json.loads(text)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)


class Tab:
    """A tab of the browser with a page."""

    def __init__(self, browser: Browser, page: Path) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.navigate", url=page.as_uri())
        self.evaluate("new Promise(done => document.readyState === 'complete' ? done() : onload = done)")

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, script: str) -> Any:
        found = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element."""
        where = self.evaluate(
            f"(() => {{const each = document.querySelector({json.dumps(selector)}); each.scrollIntoView();"
            "const box = each.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1
            )

    def column(self, number: int) -> list[str]:
        found: list[str] = self.evaluate(
            "[...document.querySelectorAll('tbody tr')].filter(row => !row.hidden)"
            f".map(row => row.cells[{number}].textContent)"
        )
        return found


@pytest.mark.timeout(120)
def test_the_index_is_sorted_and_opened_in_a_browser(pages: Path, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    browser = Browser(tmp_path)
    try:
        browser.call("Browser.getVersion")
    except EOFError:
        browser.close()
        pytest.skip(f"{CHROMIUM} does not start on this host")
    try:
        tab = Tab(browser, pages / "index.html")
        names = tab.column(0)
        assert sorted(names) != names
        tab.click("thead th:nth-child(1) button")
        assert tab.column(0) == sorted(names)
        tab.click("thead th:nth-child(3) button")
        sizes = [int(text.replace(",", "")) for text in tab.column(2)]
        assert sizes == sorted(sizes, reverse=True)
        tab.click("thead th:nth-child(3) button")
        assert [int(text.replace(",", "")) for text in tab.column(2)] == sizes[::-1]
        tab.evaluate("{const field = document.querySelector('input'); field.value = 'read';"
                     "field.dispatchEvent(new Event('input'))}")  # fmt: skip
        shown = tab.column(0)
        assert shown
        assert all("read" in name for name in shown)
        visible = "[...document.querySelectorAll('tbody a')].find(a => a.offsetParent)"
        address = tab.evaluate(f"{visible}.href")
        listing = Tab(browser, Path(address.removeprefix("file://")))
        assert listing.evaluate("document.querySelector('h1').textContent") == shown[0]
        assert listing.column(0)[0] == "+0x0"
    finally:
        browser.close()
