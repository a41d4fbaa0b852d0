"""What `kprobefs check` prints for files of definitions and several kernels; its SARIF is valid."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobefs.cli.main import main
from kprobefs.plan import check_command
from kprobefs.plan.answer import WARNINGS
from kprobefs.plan.planned_kernel import PlannedKernel, planned_kernel
from tests.guests.linux.debian_kernel import lasting_cache
from tests.image.linux import debian
from tests.plan.checked_lines import lines
from tests.plan.typed_kernel import BODY, kernel_with_types
from tests.project.readme import blocks, steps
from tests.sample import fewer

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "plan-probes.md"
PACKAGE = "@microsoft/jest-sarif@1.0.0-beta.0"
SCHEMA = "package/lib/schemas/sarif-2.1.0-rtm.5.json"
"""OASIS's schema of SARIF in the npm package PACKAGE."""


def test_the_table_has_the_beginning_of_a_long_definition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    file.write_text(f"p:long vfs_read {'a=$arg1 ' * 100_000}\n")
    assert main(["check", str(file)]) == 1
    shown = capsys.readouterr().out
    assert "p:long vfs_read a=$arg1" in shown
    assert len(shown) < 10_000


@pytest.mark.parametrize(
    ("options", "status", "rules"),
    [
        ([], 0, ["type-size", "no-member"]),
        (["--strict"], 1, ["type-size", "no-member"]),
        (["--strict", "--allow", "no-member"], 1, ["type-size"]),
        (["--strict", "--allow", "no-member", "--allow", "type-size"], 0, []),
    ],
)
def test_warnings_may_be_failures_or_left_out(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], status: int,
    rules: list[str],
) -> None:  # fmt: skip
    file = tmp_path / "x.probes"
    file.write_text("p:x f a=$arg1 b=+4($arg3):u32\n")
    command = ["check", str(file), "--image", typed, *options]
    assert main(command) == status
    assert re.findall(r"\[([a-z-]+)\]", capsys.readouterr().out) == rules
    assert main([*command, "--json"]) == status
    (checked,) = json.loads(capsys.readouterr().out)
    (line,) = checked["kernels"][0]["lines"]
    assert [finding["rule"] for finding in line["findings"]] == rules


def test_a_rule_that_does_not_exist_cannot_be_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors have rules, too, but these cannot be left out."""
    file = tmp_path / "x.probes"
    file.write_text("p:x vfs_raed\n")
    for rule, hint in (("no-membre", "no-member"), ("BAD_PROBE_ADDR", "kprobefs(1)")):
        assert main(["check", str(file), "--allow", rule]) == 2
        assert hint in capsys.readouterr().err


def test_several_kernels_have_a_column_each(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    file.write_text("# comment\np:x f\np:y vfs_read\nkprobes/enabled = 0\n")
    assert main(["check", str(file), "--image", typed, "--image", typed]) == 1
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith("2 errors, 0 warnings in 2 kernels; 1 ")
    table = text[text.index("definition") :].splitlines()
    rows = [line.split()[:4] for line in table if re.match("[2-4]     ", line)]
    assert rows == [
        ["2", "ftrace", "ftrace", "p:x"],
        ["3", "ENOENT", "ENOENT", "p:y"],
        ["4", "unchecked", "unchecked", "kprobes/enabled"],
    ]
    # A long path stays one word, which can be copied.
    assert max(len(line) for line in text.splitlines() if " " in line.strip()) <= 80
    assert main(["check", str(file), "--image", typed, "--image", typed, "--sarif"]) == 1
    log = json.loads(capsys.readouterr().out)
    (result,) = log["runs"][0]["results"]
    region = result["locations"][0]["physicalLocation"]["region"]
    assert (region, result["ruleId"]) == ({"startLine": 3, "startColumn": 5}, "BAD_PROBE_ADDR")


def test_definitions_are_below_the_columns_if_they_do_not_fit(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If definitions do not fit beside the columns of the kernels, they are below, and no line is longer than
    80.

    No word is broken, and even the longest errno is separated from the next column.
    """
    file = tmp_path / "x.probes"
    lines = ["p:b twice", "p:x f number=$arg1:s32 size=$arg2:u64 first=+0($arg3):s32 second=+8($arg3):u64"]
    file.write_text("\n".join(lines) + "\n")
    for count in range(1, 6):
        assert main(["check", str(file), *["--image", typed] * count]) == 1
        text = capsys.readouterr().out
        shown = text[text.index("\nline ") : text.index(f"\n\n{file}")].splitlines()
        assert max(map(len, shown)) <= 80
        words = " ".join(shown[2:]).split()
        assert [word for word in words if word in lines[1].split()] == lines[1].split()
        assert words.count("EADDRNOTAVAIL") == words.count("ftrace") == count


def test_a_caret_is_below_its_column_in_a_long_line(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    for wrong in range(8):
        words = [f"argument{number}=$arg2:u64" for number in range(8)]
        words[wrong] = f"argument{wrong}=$nosuch:u64"
        file.write_text(f"p:x f {' '.join(words)}\n")
        assert main(["check", str(file), "--image", typed]) == 1
        lines = capsys.readouterr().out.splitlines()
        (number,) = (number for number, line in enumerate(lines) if line.strip() == "^")
        assert lines[number - 1][lines[number].index("^") :].startswith("$nosuch")
        assert len(lines[number - 1]) <= 80


def test_one_finding_for_all_cpus_is_one_result(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finding for one of a kernel's CPUs names the CPU."""
    (tmp_path / "other").mkdir()
    other = kernel_with_types(tmp_path / "other", BODY[1:4] + BODY[:1] + BODY[4:])
    kernels = []

    def with_cpu(*arguments: Any) -> PlannedKernel:
        kernels.append(planned_kernel(*arguments))
        kernels[-1].cpu_description = f"CPU {len(kernels)}"
        return kernels[-1]

    monkeypatch.setattr(check_command, "planned_kernel", with_cpu)
    file = tmp_path / "x.probes"
    file.write_text("p f+6\np vfs_read\n")
    assert main(["check", str(file), "--image", typed, "--image", other, "--sarif"]) == 1
    results = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    found = {each["ruleId"]: each["message"]["text"] for each in results}
    assert len(found) == len(results)
    assert ["CPU 2" in found["BAD_INSN_BNDRY"], "CPU 1" in found["BAD_INSN_BNDRY"]] == [True, False]
    assert "CPU" not in found["BAD_PROBE_ADDR"]


def test_a_place_that_is_another_instruction_in_one_of_the_kernels(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    # mov %rdi,%rbx; push %rbx: this kernel has another instruction at +5, and one at +8.
    other = kernel_with_types(tmp_path / "other", BODY[1:4] + BODY[:1] + BODY[4:])
    file = tmp_path / "x.probes"
    file.write_text("p f+5\np f+8\np f+12\np f\nr f\n")
    images = ["--image", typed, "--image", other, "--image", typed]
    assert main(["check", str(file), *images, "--json"]) == 1
    kernels = json.loads(capsys.readouterr().out)[0]["kernels"]
    found = [
        (line["line"], finding["message"])
        for kernel in kernels
        for line in kernel["lines"]
        for finding in line["findings"]
        if finding["rule"] == "other-instruction"
    ]
    assert len(found) == len(kernels)
    ((number, message),) = set(found)
    assert number == 1
    assert message.index("pushq %rbx") < message.index("movq %rdi, %rbx")
    assert main(["check", str(file), "--image", typed, "--image", typed]) == 1
    assert "other-instruction" not in capsys.readouterr().out
    assert main(["check", str(file), *images]) == 1
    text = capsys.readouterr().out
    assert text.count("[other-instruction]") == 1
    assert len(re.findall(r":2\s+\(1,\s+3\):\s+error:\s+EILSEQ:", text)) == text.count("EILSEQ:") == 1


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("p f a=$arg1:s32 b=$arg2 c=$arg3", [[], []]),
        ("p f a=+0($arg3):s32", [["other-member"], ["type-size", "other-member"]]),
        ("p f a=+4($arg3):x8[4]", [["no-member"], ["no-member"]]),
        ("p f a=+12($arg3):x8[4]", [["no-member"], ["no-member"]]),
        ("p g a=+0(+8($arg1)):x8[2]", [["other-member"], ["other-member"]]),
        ("p g a=+16($arg1) b=+0(+64($arg1)):x8[2]", [[], []]),
        ("p g a=+40(+64($arg1)):x64", [[], []]),
        ("p g a=$arg4 b=$arg5", [[], []]),
        ("p g a=$arg2 b=%si c=$arg2:s64", [["other-parameter"] * 2] * 2),
        ("p g a=+0($arg2):x8[2]", [["no-pointer", "other-parameter"], ["other-parameter"]]),
        ("r g a=$retval b=+0($retval):s32", [[], []]),
    ],
)
def test_lines_that_mean_other_things_in_one_of_the_kernels(
    typed: str, line: str, rules: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` warns if a line means something else in one of the given kernels.

    The second kernel has other parameters and members. Twice the same kernel causes no such warning.
    """
    (tmp_path / "later").mkdir()
    later = kernel_with_types(tmp_path / "later", is_later=True)
    file = tmp_path / "x.probes"
    file.write_text(f"{line}\n")

    def found(*images: str) -> list[list[str]]:
        assert (
            main(["check", str(file), *[word for image in images for word in ("--image", image)], "--json"])
            == 0
        )
        (checked,) = json.loads(capsys.readouterr().out)
        answers = [each["lines"][0] for each in checked["kernels"]]
        return [[finding["rule"] for finding in answer["findings"]] for answer in answers]

    assert found(typed, later) == rules
    differences = [[rule for rule in each if not rule.startswith("other-")] for each in rules]
    assert found(typed, typed) == [differences[0]] * 2


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        # The narrower size is right in both kernels, as long as the value fits.
        ("r narrowed a=$retval:s32", [[], []]),
        ("p narrowed a=+0($arg1):s32", [[], []]),
        ("r narrowed a=$retval:s64", [["other-parameter"], ["type-size", "other-parameter"]]),
        ("r narrowed a=$retval", [["other-parameter"], ["type-size", "other-parameter"]]),
        ("r narrowed a=$retval:s16", [["type-size", "other-parameter"]] * 2),
        ("r narrowed a=$retval:u32", [[], ["type-sign"]]),
        (
            "r narrowed a=$retval:s32 b=$retval:s64",
            [["other-parameter"], ["type-size", "other-parameter"]],
        ),
        ("p narrowed a=+0($arg1):s64", [[], ["type-size"]]),
        ("p narrowed a=+0($arg1):s16", [["type-size"], ["type-size"]]),
    ],
)
def test_a_value_that_is_narrower_in_one_of_the_kernels(
    typed: str, line: str, rules: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "later").mkdir()
    later = kernel_with_types(tmp_path / "later", is_later=True)
    file = tmp_path / "x.probes"
    file.write_text(f"{line}\n")
    assert main(["check", str(file), "--image", typed, "--image", later, "--json"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)
    answers = [each["lines"][0] for each in checked["kernels"]]
    assert [[finding["rule"] for finding in answer["findings"]] for answer in answers] == rules


def test_the_kernels_own_kprobes_leave_no_choice(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    file.write_text("p:x f\n")
    own = ["check", str(file), "--kprobes", "kernel"]
    assert main([*own, "--image", typed]) == 0
    assert "ftrace" in capsys.readouterr().out
    for options, message in (
        ([], "--kprobes kernel: no kernel given; add --image"),
        (["--image", typed, "--profile", "linux-6.12"], "--profile: not possible with --kprobes kernel"),
        (["--image", typed, "--strategy", "extended"], "--strategy: not possible with --kprobes kernel"),
    ):
        assert main([*own, *options]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def sarif(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a validator of SARIF logs. The package with the schema is fetched once per machine."""
    kept = lasting_cache("sarif") / PACKAGE
    if not kept.exists():
        if shutil.which("npm") is None:
            pytest.skip("no npm, which has the schema of SARIF")
        place = tmp_path_factory.mktemp("npm")
        command = ("npm", "pack", "--silent", PACKAGE)
        made = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
        found = [*place.glob("*.tgz")]
        if not found:
            pytest.skip(f"npm cannot fetch the schema of SARIF: {made.stderr.strip()}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Another worker may fetch the same.
        new = kept.with_name(f"{kept.name}.{os.getpid()}")
        shutil.copyfile(found[0], new)
        new.replace(kept)
    with tarfile.open(kept) as package:
        file = package.extractfile(SCHEMA)
        assert file is not None
        schema = json.load(file)
    # validate() would check the schema again for each log.
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


@settings(max_examples=fewer(40, 2))
@given(texts=st.lists(lines, max_size=8))
def test_sarif_logs_are_valid(sarif: Any, texts: list[str]) -> None:
    log = sarif_of("\n".join(texts))
    sarif.validate(log)
    rules = [rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]]
    for result in log["runs"][0]["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        place = result["locations"][0]["physicalLocation"]["region"]
        assert 1 <= place["startLine"] <= len(texts)


def sarif_of(text: str) -> Any:
    from contextlib import redirect_stdout
    from io import StringIO
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile("w", suffix=".probes") as file, redirect_stdout(StringIO()) as out:
        file.write(text)
        file.flush()
        main(["check", file.name, "--sarif"])
    return json.loads(out.getvalue())


def test_each_warning_is_explained_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs/man/kprobefs.1").read_text().replace("\\-", "-")
    for rule in WARNINGS:
        assert rule in manual


def test_definitions_from_standard_input() -> None:
    command = [sys.executable, "-m", "kprobefs", "check", "-", "--json"]
    done = subprocess.run(command, input="p vfs_read\n", capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)
    assert found["kernels"][0]["lines"][0]["outcome"] == "ftrace"


def test_definitions_that_are_no_text_are_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    file.write_bytes(b"p:a vfs_\x86read\np:b \xff\xfe\x00\nr:\x80 vfs_read\np " + bytes(range(128, 256)))
    assert main(["check", str(file)]) == 1
    assert "\x86" not in capsys.readouterr().out
    assert main(["check", str(file), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert {line["outcome"] for line in found["kernels"][0]["lines"]} <= {"EINVAL", "ENOENT"}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark(encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.probes"
    file.write_text("p vfs_read\n", encoding)
    assert main(["check", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kprobefs: {file}: it begins with a byte order mark (UTF-")
    assert line.endswith("; save it as UTF-8 without the mark")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nonexistent"], "/nonexistent"),
        (["/etc"], "/etc"),
        (["/dev/null", "--profile", "windows"], "no profile"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_debian(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = debian.package("linux-image-cloud-amd64")
    file = tmp_path / "x.probes"
    file.write_text("p:send tcp_sendmsg+5 size=%dx:u64\np:short tcp_sendmsg size=$arg3:u32\nr:x vfs_raed\n")
    assert main(["check", str(file), "--image", str(package), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    send, short, wrong = found["kernels"][0]["lines"]
    assert (send["outcome"], send["findings"]) == ("optimized", [])
    assert [finding["rule"] for finding in short["findings"]] == ["type-size"]
    assert wrong["outcome"] == "ENOENT"
    assert "vfs_read" in wrong["findings"][0]["message"]


def test_the_guide_shows_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = debian.package("linux-image-6.1.0-50-cloud-amd64")
    shown, check = [step for body in blocks("console check", GUIDE) for step in steps(body)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / shown.command.removeprefix("cat ")).write_text(shown.output)
    _, *words = check.command.replace("$D", str(package)).split()
    assert main(words) == 1
    assert capsys.readouterr().out == check.output
