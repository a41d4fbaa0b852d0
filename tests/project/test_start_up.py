"""Modules that a start imports, and functions that dataclasses compile during a start."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import subprocess
import sys
import textwrap
from typing import Any, ClassVar

import pytest

from emulated_kernel.util.fast_dataclass import ADDRESS, asdict, dataclass, field, immutable, replace

ELSEWHERE = (
    "emulated_kernel.arch.riscv",
    "emulated_kernel.image.linux",
    "emulated_kernel.guests.linux",
    "emulated_kernel.guests.builtin.processes.isolated",
    "emulated_kernel.guests.builtin.runner.smp",
    "emulated_kernel.machine.text.stale_fetch",
    "kprobefs.daemon.state.saved_state",
    "hashlib",
    "statistics",
)
"""Modules that a daemon with our own x86_64 kernel and one CPU does not need to start."""

BOOT = """
import sys
import kprobefs.cli.main, kprobefs.daemon.daemon
from emulated_kernel.util.config import MachineConfig
from kprobefs.daemon.backends import build_kernel
from kprobefs.mount_options import MountOptions
import kprobefs.definitions.tracefs_files
mount = build_kernel(MountOptions("/nowhere", MachineConfig()))
ours = lambda: {name for name in sys.modules if name.partition(".")[0] in ("emulated_kernel", "kprobefs")}
"""
USE = """
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.vfs.core.client import Client
kernel = Kernel()
files = kprobefs.definitions.tracefs_files.TreeFiles(kernel.filesystem(), Client(pid=0, uid=0, gid=0))
began = ours()
with kernel.lock:
    files.write("tracing/dynamic_events", "p:p int_sqrt count=$arg1\\n")
    files.write("tracing/dynamic_events", "r:r int_sqrt $retval\\n")
    files.write("tracing/dynamic_events", "s:s u64 n\\n")
    files.write("tracing/dynamic_events", "e:e sched.sched_switch pid=$next_pid\\n")
    files.write("tracing/events/kprobes/p/filter", "count > 1")
    files.write("tracing/events/kprobes/p/trigger", "hist:keys=common_pid:sort=hitcount")
    files.write("tracing/events/kprobes/p/trigger", "stacktrace if count > 2")
    files.write("tracing/events/kprobes/p/enable", "1")
    files.write("tracing/events/sched/enable", "1")
    files.mkdir("tracing/instances/other")
    for tracer in ("function", "function_graph", "nop"):
        files.write("tracing/current_tracer", tracer)
        kernel.call("int_sqrt", 144)
    for name in ("tracing/trace", "tracing/events/kprobes/p/hist", "kprobes/list", "tracing/stack_trace"):
        files.read(name)
for _ in range(4):
    kernel.call("int_sqrt", 144)
print(sorted(ours() - began))
"""


def told(script: str) -> str:
    """Return the output of a script in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout


def test_a_mount_imports_what_it_may_need() -> None:
    """A mount imports neither other architectures nor modules that only distributions' kernels or other
    options need.
    """
    loaded = told(f"{BOOT}\nprint(*sys.modules)").split()
    assert [name for name in loaded if name.startswith(ELSEWHERE)] == []


DISTRIBUTION = (
    "import emulated_kernel.guests.linux.boot_cache, emulated_kernel.guests.linux.mounts.probed_mount"
)


def test_a_mount_of_a_distribution_s_kernel_imports_nothing_of_our_own() -> None:
    """A mount of a distribution's kernel imports neither kprobefs's own kernel nor its machine."""
    loaded = told(f"import sys\n{DISTRIBUTION}\nprint(*sys.modules)").split()
    own = ("emulated_kernel.guests.builtin", "emulated_kernel.kernel", "emulated_kernel.machine.machine")
    assert [name for name in loaded if name.startswith(own)] == []


def test_a_mount_of_a_distribution_s_kernel_imports_no_other_processor() -> None:
    """A mount of a distribution's kernel imports no other architecture, except formats of kernel files, which
    are recognized by their contents.
    """
    loaded = told(f"import sys\n{DISTRIBUTION}\nprint(*sys.modules)").split()
    found = [name for name in loaded if "arm64" in name or "riscv" in name]
    assert [name for name in found if not name.startswith("emulated_kernel.image.linux.")] == []


def test_a_running_daemon_has_all_that_it_runs() -> None:
    """A running daemon imports no further module, because its files may be replaced by those of another
    version.
    """
    assert told(BOOT + USE) == "[]\n"


def test_dataclasses_share_their_code() -> None:
    """Dataclasses share the code of their methods.

    Compiling a function for each class would be a fifth of the time of a start.
    """
    audited = """
    import sys
    compiled = []
    sys.addaudithook(lambda event, args: compiled.append(args[1]) if event == "compile" else None)
    """
    counted = """
    classes = {each for name in ours() for each in vars(sys.modules[name]).values() if isinstance(each, type)}
    print(sum("__dataclass_fields__" in vars(each) for each in classes), compiled.count("<dataclass>"))
    """
    classes, functions = map(int, told(textwrap.dedent(audited) + BOOT + textwrap.dedent(counted)).split())
    assert 0 < functions < classes / 3


SOURCE_READERS = {"ast", "dataclasses", "dis", "inspect"}
"""Modules of the standard library that read Python's source text, and take long to import."""
UNUSED_BY_STATUS = SOURCE_READERS | {
    "ctypes",
    "lzma",
    "shutil",
    "subprocess",
    "tempfile",
    "threading",
    "typing",
}
UNUSED_BY_HELP = UNUSED_BY_STATUS | {"json", "pathlib"}


@pytest.mark.parametrize(
    ("script", "unused"),
    [
        ("import kprobefs.cli.main; kprobefs.cli.main.main(['--help'])", UNUSED_BY_HELP),
        ("import kprobefs.cli.main; kprobefs.cli.main.main(['status'])", UNUSED_BY_STATUS),
        (BOOT, SOURCE_READERS),
        ("import kprobefs.cli.run, emulated_kernel.guests.linux.mounts.probed_mount", SOURCE_READERS),
    ],
    ids=["help", "status", "mount", "distribution"],
)
def test_a_command_imports_what_it_uses(script: str, unused: set[str]) -> None:
    """A command imports only modules that it uses, apart from those that Python's argparse needs to print
    help of a known width.
    """
    ending = "\nimport sys\nprint(); print(*sys.modules)"
    form = "lambda prog: argparse.HelpFormatter(prog, width=80)"
    parser = f"import argparse; argparse.ArgumentParser(formatter_class={form}).print_help()"
    loaded, of_python = (set(told(each + ending).splitlines()[-1].split()) for each in (script, parser))
    assert (loaded - of_python) & unused == set()


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"frozen": True, "slots": True}, {"eq": False}])
def test_our_dataclasses_are_those_of_the_library(options: dict[str, bool]) -> None:
    """kprobefs's dataclasses behave as those of the standard library, except that only mypy enforces
    `frozen`.
    """

    class Plain:
        number: int
        text: str = "x"
        aside: object = dataclasses.field(default=None, compare=False)
        hidden: int = dataclasses.field(default=3, repr=False)

    ours, theirs = (
        make(**options)(type("Made", (), dict(vars(Plain)))) for make in (dataclass, dataclasses.dataclass)
    )
    values = [(1,), (1, "y"), (1, "x", [2]), (1, "x", None, 4)]
    for left in values:
        mine, other = ours(*left), theirs(*left)
        assert repr(mine) == repr(other)
        assert dataclasses.asdict(mine) == dataclasses.asdict(other)
        assert (mine == other) is (other == mine) is False
        for right in values:
            assert (mine == ours(*right)) == (other == theirs(*right))
            if other.__hash__ is not None and theirs(*right) == other:
                assert hash(mine) == hash(ours(*right))
        assert dataclasses.replace(mine, number=7) == ours(7, *left[1:]) or not options.get("eq", True)
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)


class Parameters:
    """A class with fields of each kind: by position or name, with and without defaults and factories, and
    outside of __init__.
    """

    number: int
    text: str = "x"
    items: list[int] = dataclasses.field(default_factory=list)
    limit: ClassVar[int] = 5
    state: int = dataclasses.field(default=7, init=False)
    cells: dict[str, int] = dataclasses.field(default_factory=dict, init=False)
    late: int = dataclasses.field(init=False)
    named: int = dataclasses.field(kw_only=True)
    also: list[int] = dataclasses.field(default_factory=list, kw_only=True)

    def __post_init__(self) -> None:
        self.late = self.number + 1


@pytest.mark.parametrize("options", [{}, {"slots": True}, {"slots": True, "weakref_slot": True}])
def test_init_is_that_of_the_library(options: dict[str, bool]) -> None:
    def derived(make: Any) -> Any:
        body = {
            name: each for name, each in vars(Parameters).items() if name not in ("__dict__", "__weakref__")
        }
        base = make(**options)(type("Base", (), body))
        own = {
            "__annotations__": {"text": "str", "more": "int"},
            "text": "y",
            "more": 3,
            "__module__": __name__,
        }
        return base, make(**options)(type("Derived", (base,), own))

    calls: list[tuple[tuple[object, ...], dict[str, object]]] = [
        ((1,), {"named": 2}),
        ((1, "z", [4]), {"named": 2, "also": [3]}),
        ((), {"number": 1, "named": 2}),
        ((1,), {}),
        ((1, 2, 3, 4, 5), {"named": 2}),
        ((1,), {"named": 2, "state": 3}),
    ]
    for mine, other in zip(derived(dataclass), derived(dataclasses.dataclass), strict=True):
        assert inspect.signature(mine).parameters.keys() == inspect.signature(other).parameters.keys()
        assert str(inspect.signature(mine)) == str(inspect.signature(other))
        assert mine.__match_args__ == other.__match_args__
        names, others = ([each.name for each in dataclasses.fields(made)] for made in (mine, other))
        assert names == others
        assert hasattr(mine, "__slots__") == hasattr(other, "__slots__")
        for given, named in calls:
            left, right = (outcome(made, *given, **named) for made in (mine, other))
            assert left == right
        with_dict = [hasattr(made(1, named=2), "__dict__") for made in (mine, other)]
        assert with_dict[0] == with_dict[1]
        one, two = mine(1, named=2), mine(1, named=2)
        assert one.items is not two.items
        assert replace(one, number=4) == dataclasses.replace(one, number=4) == mine(4, named=2)
        assert asdict(one) == dataclasses.asdict(one) == dataclasses.asdict(other(1, named=2))
        with pytest.raises(ValueError, match="state"):
            replace(one, state=1)


def test_a_class_gets_its_init_with_its_first_object() -> None:
    """A dataclass gets its __init__ with its first object, even if this is an object of a subclass."""

    @dataclass
    class Base:
        number: int
        items: list[int] = field(default_factory=list)

    class Derived(Base):
        pass

    class Caller(Base):
        def __init__(self, number: int) -> None:
            super().__init__(number + 1)

    @dataclass
    class Further(Base):
        text: str = "x"

    found: list[Base] = [Derived(1), Further(2, [3], "y"), Caller(4), Base(5)]
    assert [vars(each) for each in found] == [
        {"number": 1, "items": []},
        {"number": 2, "items": [3], "text": "y"},
        {"number": 5, "items": []},
        {"number": 5, "items": []},
    ]
    assert Derived.__init__ is Base.__init__ is not Further.__init__


def outcome(made: Any, *given: object, **named: object) -> str:
    """Return the repr of a new object, or the error of its creation."""
    try:
        return repr(made(*given, **named))
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"__annotations__": {"one": "int", "two": "int"}, "one": 1}, TypeError),
        ({"__annotations__": {"one": "list"}, "one": []}, ValueError),
        ({"__annotations__": {"one": "int"}, "__slots__": ("other",)}, TypeError),
    ],
)
def test_wrong_classes_are_refused_as_in_the_library(body: dict[str, object], error: type[Exception]) -> None:
    for make in (dataclass, dataclasses.dataclass):
        with pytest.raises(error):
            make(slots=True)(type("Made", (), dict(body)))


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"eq": False}])
@pytest.mark.parametrize("own", [("__eq__",), ("__hash__",), ("__eq__", "__hash__")])
def test_what_a_class_says_itself_stays(own: tuple[str, ...], options: dict[str, bool]) -> None:
    said = {"__eq__": lambda _left, _right: True, "__hash__": lambda _: 7}
    body = {"__annotations__": {"number": int}, **{name: said[name] for name in own}}
    ours, theirs = (
        make(**options)(type("Made", (), dict(body))) for make in (dataclass, dataclasses.dataclass)
    )
    assert (ours(1) == ours(2)) == (theirs(1) == theirs(2))
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)
    if theirs.__hash__ is not None:
        assert (hash(ours(1)) == 7) == (hash(theirs(1)) == 7)


@pytest.mark.parametrize("options", [{"order": True}, {"unsafe_hash": True}])
def test_options_that_our_dataclass_does_not_carry(options: dict[str, bool]) -> None:
    with pytest.raises(TypeError, match=f"has no {next(iter(options))}$"):
        dataclass(**options)
    with pytest.raises(TypeError, match=r"has no field\(hash=\)$"):
        dataclass(type("Made", (), {"__annotations__": {"n": int}, "n": dataclasses.field(hash=False)}))


@pytest.mark.parametrize(
    "annotation", ["InitVar[int]", "dataclasses.InitVar", dataclasses.InitVar[int], "KW_ONLY"]
)
def test_annotations_that_our_dataclass_does_not_carry(annotation: object) -> None:
    with pytest.raises(TypeError, match=r"has no (InitVar|KW_ONLY)$"):
        dataclass(type("Made", (), {"__annotations__": {"one": annotation}}))


@pytest.mark.parametrize(
    "annotation", ["ClassVar", "ClassVar[int]", "typing.ClassVar[int]", ClassVar[int], ClassVar]
)
def test_class_variables_are_no_fields(annotation: object) -> None:
    made = dataclass(type("Made", (), {"__annotations__": {"one": annotation, "two": "ClassVariable"}}))
    assert [each.name for each in dataclasses.fields(made)] == ["two"]


def test_the_library_s_classes_are_no_bases_of_ours() -> None:
    base = dataclasses.dataclass(type("Base", (), {"__annotations__": {"one": "int"}}))
    with pytest.raises(TypeError, match="Base is a class of the library's"):
        dataclass(type("Derived", (base,), {}))
    ours = dataclass(type("Ours", (), {"__annotations__": {"one": "int"}}))
    theirs = dataclasses.dataclass(type("Theirs", (ours,), {"__annotations__": {"two": "int"}}))
    assert [each.name for each in dataclasses.fields(theirs)] == ["one", "two"]
    assert repr(theirs(1, 2)).endswith("Theirs(one=1, two=2)")
    plain = type("Plain", (ours,), {})
    assert dataclasses.fields(plain) == dataclasses.fields(plain)
    last = dataclass(type("Last", (plain,), {"__annotations__": {"three": "int"}}))
    assert last(1, 3) == dataclasses.replace(last(1, 2), three=3)


@immutable
@dataclass(frozen=True)
class Place:
    address: int = dataclasses.field(metadata=ADDRESS)
    others: tuple[int, ...] = dataclasses.field(default=(), metadata=ADDRESS)


def test_an_immutable_object_refuses_assignments() -> None:
    place = Place(16)
    for name in ("address", "others", "unknown"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(place, name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del place.address  # type: ignore[misc]
    assert place == Place(16) == copy.deepcopy(place)
    assert dataclasses.replace(place, address=17) == Place(17)


def test_a_repr_shows_addresses_in_hexadecimal() -> None:
    assert repr(Place(255, (1, 16))).endswith("Place(address=0xff, others=(0x1, 0x10))")
    assert repr(Place(255, (16,))).endswith("others=(0x10,))")
