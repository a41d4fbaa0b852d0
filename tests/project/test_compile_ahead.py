"""Modules without bytecode are compiled ahead in a second process. Imports work with and without this
process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuse.harness import eventually, is_alive

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")

AUDITED = """
import os, sys
compiled, forks = [], 0
def hook(event, args):
    global forks
    if event == "compile":
        compiled.append(str(args[1]))
    forks += event == "os.fork"
sys.addaudithook(hook)
from kprobefs.common import compile_ahead
from kprobefs.common.compile_ahead import CompileAhead
def wait_until_compiled():
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
"""


@pytest.fixture
def told(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that runs a script in a process without bytecode caches, and returns its output."""
    caches = {"PYTHONPYCACHEPREFIX": str(tmp_path / "none"), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(script: str) -> str:
        command = [sys.executable, "-c", AUDITED + textwrap.dedent(script)]
        return subprocess.run(
            command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    return run


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Make two packages, each with one module, and return the directory."""
    for name in ("one", "two"):
        (tmp_path / "modules" / name).mkdir(parents=True)
        (tmp_path / "modules" / name / "__init__.py").write_text(f"value = {name!r}\n")
    return tmp_path / "modules"


def test_a_kernel_works_by_code_of_the_other_process(told: Callable[[str], str]) -> None:
    answer = told("""
    compile_ahead.begin()
    wait_until_compiled()
    from emulated_kernel import Kernel
    with Kernel() as kernel:
        print(kernel.call("int_sqrt", 144))
    compile_ahead.end()
    there = ("/trace/", "/kprobes/", "/vfs/", "/machine/", "/arch/x86/")
    here = [path for path in compiled if "/emulated_kernel/" in path and not path.endswith("__init__.py")]
    print([path for path in here if any(part in path for part in there)])
    """)
    assert answer == "12\n[]\n"


def test_imports_do_not_wait_for_the_other_process(package: Path, told: Callable[[str], str]) -> None:
    """If the second process is killed, imports compile the remaining modules."""
    answer = told(f"""
    import signal
    sys.path.append({str(package)!r})
    ahead = CompileAhead([{str(package)!r}])
    children = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()
    os.kill(int(children[0]), signal.SIGKILL)
    import one, two
    ahead.end()
    print(one.value, two.value)
    """)
    assert answer == "one two\n"


def test_code_of_another_source_is_not_used(package: Path, told: Callable[[str], str]) -> None:
    """If a package is upgraded between the compilation and the import, the import compiles the new source."""
    answer = told(f"""
    sys.path.append({str(package)!r})
    ahead = CompileAhead([{str(package)!r}])
    wait_until_compiled()
    with open({str(package / "one" / "__init__.py")!r}, "w") as file:
        file.write("value = 'new'\\n")
    compiled.clear()
    import one, two
    print(one.value, two.value, *compiled)
    """)
    assert answer == f"new two {package}/one/__init__.py\n"


@pytest.mark.parametrize("size", [0, 100])
def test_a_limit_of_file_sizes_limits_only_the_help(
    size: int, package: Path, told: Callable[[str], str]
) -> None:
    """If a limit of file sizes stops the second process in the middle of its work, imports compile the
    modules without an error.
    """
    answer = told(f"""
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
    sys.path.append({str(package)!r})
    ahead = CompileAhead([{str(package)!r}])
    wait_until_compiled()
    compiled.clear()
    import one, two
    print(one.value, two.value, len(compiled))
    """)
    assert answer == "one two 2\n"


def test_an_import_reports_what_cannot_be_compiled(package: Path, told: Callable[[str], str]) -> None:
    (package / "one" / "__init__.py").write_text("value =\n")
    answer = told(f"""
    sys.path.append({str(package)!r})
    ahead = CompileAhead([{str(package)!r}])
    wait_until_compiled()
    try:
        import one
    except SyntaxError as error:
        print(error.filename)
    import two
    print(two.value)
    """)
    assert answer == f"{package}/one/__init__.py\ntwo\n"


def test_imports_after_the_end_compile(package: Path, told: Callable[[str], str]) -> None:
    """After end(), imports compile modules, and no process and no open file is left.

    A forked process can call end(), too.
    """
    answer = told(f"""
    sys.path.append({str(package)!r})
    before = os.listdir("/proc/self/fd")
    ahead = CompileAhead([{str(package)!r}])
    import one
    forked = os.fork()
    if forked == 0:
        ahead.end()
        import two
        print(two.value, flush=True)
        os._exit(0)
    os.waitpid(forked, 0)
    ahead.end()
    import two
    print(two.value, os.listdir("/proc/self/fd") == before)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED)
    except ChildProcessError:
        print("no child")
    """)
    assert answer == "two\ntwo True\nno child\n"


def test_the_process_ends_after_its_owner(tmp_path: Path, told: Callable[[str], str]) -> None:
    for number in range(3000):
        (tmp_path / f"module{number}.py").write_text("value = [" + "1 + x, " * 500 + "]\n")
    pid = told(f"""
    compiling = CompileAhead([{str(tmp_path)!r}])
    print(open(f"/proc/self/task/{{os.getpid()}}/children").read(), flush=True)
    os.close(1)
    """)
    eventually(lambda: not is_alive(int(pid)))


def test_modules_without_source_are_found(package: Path, told: Callable[[str], str]) -> None:
    """Modules are found even if a distribution has removed their sources and kept the bytecode."""
    answer = told(f"""
    import py_compile
    for name in ("one", "two"):
        place = {str(package)!r} + "/" + name + "/__init__.py"
        py_compile.compile(place, place + "c")
        os.unlink(place)
    sys.path.append({str(package)!r})
    ahead = CompileAhead([{str(package)!r}])
    import one, two
    print(one.value, two.value, one.__file__)
    """)
    assert answer == f"one two {package}/one/__init__.pyc\n"


def test_packages_in_a_zip_file_are_found(package: Path, told: Callable[[str], str]) -> None:
    answer = told(f"""
    import shutil
    file = shutil.make_archive({str(package)!r}, "zip", {str(package)!r})
    sys.path.append(file)
    ahead = CompileAhead([file])
    import one, two
    print(one.value, two.value)
    ahead.end()
    """)
    assert answer == "one two\n"


def test_no_module_is_compiled_after_its_import(package: Path, told: Callable[[str], str]) -> None:
    answer = told(f"""
    import signal, time
    for number in range(300):
        with open(f"{package}/module{{number}}.py", "w") as file:
            file.write("value = [" + "1 + x, " * 500 + "]\\n")
    sys.path.append({str(package)!r})
    ahead = CompileAhead([{str(package)!r}])
    child = int(open(f"/proc/self/task/{{os.getpid()}}/children").read())
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED)
    import one, two
    os.kill(child, signal.SIGCONT)
    wait_until_compiled()
    for path in ("one/__init__.py", "two/__init__.py", "module7.py"):
        path = {str(package)!r} + "/" + path
        print(ahead.take(path, open(path, "rb").read()) is not None)
    """)
    assert answer == "False\nFalse\nTrue\n"


@pytest.mark.parametrize("reason", ["bytecode", "one CPU", "imported"])
def test_no_process_is_started_in_vain(reason: str, told: Callable[[str], str]) -> None:
    prepare = {
        "bytecode": "sys.dont_write_bytecode = False\nimport emulated_kernel.arch.x86\n"
        "del sys.modules['emulated_kernel.arch.x86']",
        "one CPU": "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
        "imported": "import emulated_kernel.arch.x86",
    }
    assert told("compile_ahead.begin()\nprint(forks)\ncompile_ahead.end()") == "1\n"
    assert told(f"{prepare[reason]}\ncompile_ahead.begin()\nprint(forks)") == "0\n"
