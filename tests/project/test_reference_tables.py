"""The tables of docs/reference have the rows that the source implies, and no others."""

from __future__ import annotations

import ast

from scripts.reference_tables import raised_errnos, readers


def parsed(**modules: str) -> dict[str, ast.Module]:
    """Return path -> syntax tree of modules. `modules`: name -> text."""
    return {f"kprobefs/{name}.py": ast.parse(text) for name, text in modules.items()}


OPTIONS = """
def direct(parsed, options):
    return parsed.state, self._options.modules

def of_the_machine(options):
    return options.machine.clock

class Service:
    def of_the_machine(self):
        return self._options.machine.clock

def by_a_local_name(options):
    machine = options.machine
    return machine.clock

def of_another_object(other):
    machine = other.machine
    return machine.clock, other.machine.clock, other.state

class MountOptions:
    def own(self):
        return self.machine.clock, self.state

def of_no_configuration(options):
    return options.machine.state
"""


def test_options_are_read_through_the_machines_configuration_too() -> None:
    found = readers({"clock", "state", "modules"}, parsed(a=OPTIONS))
    assert found == {
        "clock": {
            f"`kprobefs/a.py:{name}`"
            for name in ("of_the_machine", "Service.of_the_machine", "by_a_local_name", "MountOptions.own")
        },
        "state": {"`kprobefs/a.py:direct`", "`kprobefs/a.py:MountOptions.own`"},
        "modules": {"`kprobefs/a.py:direct`"},
    }


def test_options_of_the_library_are_no_options_of_the_program() -> None:
    tree = ast.parse("def f(self, config):\n    return self.options.flags, self.config.clock")
    found = readers({"flags", "clock"}, {"emulated_kernel/a.py": tree})
    assert found == {"clock": {"`emulated_kernel/a.py:f`"}}


def test_functions_that_get_an_option_as_an_argument_are_listed() -> None:
    text = """
def chosen(name, again=None):
    return further(name)

def further(name):
    return name

def by_position(parsed):
    return chosen(parsed.cpu)

def by_name(parsed):
    return further(name=parsed.clock), chosen("rome", again=parsed.clock.name)
"""
    found = readers({"cpu", "clock"}, parsed(a=text))
    assert found == {
        "cpu": {"`kprobefs/a.py:by_position`", "`kprobefs/a.py:chosen`"},
        "clock": {"`kprobefs/a.py:by_name`", "`kprobefs/a.py:further`"},
    }


ERRORS = """
class KernelError(OSError):
    def __init__(self, errno, message=""):
        super().__init__(errno, message or os.strerror(errno))

class NotFound(KernelError):
    pass

def check(room, number):
    if not room:
        raise KernelError(number)
"""
CALLERS = """
import errno
from errno import EAGAIN, EPERM
from kprobefs import errors as all_errors
from kprobefs.errors import KernelError, NotFound, check as checked

class Table:
    def find(self, number):
        raise KernelError(number)

    def by_self(self):
        self.find(errno.ENOENT)

    def by_error(self):
        raise NotFound(errno.ESRCH if self else errno.ENODEV)

    def by_keyword(self):
        checked(room=0, number=EPERM)

class SmallTable(Table):
    def inherited(self):
        self.find(errno.EBUSY)

class Other:
    def find(self, number):
        return number

    def by_self(self):
        return self.find(errno.EEXIST)

def by_module():
    all_errors.check(1, EAGAIN)

def by_unknown_object(table):
    table.find(errno.EIO)

def by_argument(checked):
    checked(0, errno.EIO)

def by_text():
    return os.strerror(errno.EIO)

def by_unknown_position(words):
    checked(*words, errno.EIO)

def system_call(number):
    number = get_errno()
    raise OSError(number, "")

def by_another_value():
    system_call(errno.EIO)

def nesting():
    def nested():
        raise OSError(errno.EXDEV, "")
    return nested
"""


def test_an_errno_is_found_where_the_source_shows_which_function_is_called() -> None:
    assert raised_errnos(parsed(errors=ERRORS, callers=CALLERS)) == {
        name: {f"`kprobefs/callers.py:{caller}`"}
        for name, caller in {
            "ENOENT": "Table.by_self",
            "ESRCH": "Table.by_error",
            "ENODEV": "Table.by_error",
            "EPERM": "Table.by_keyword",
            "EBUSY": "SmallTable.inherited",
            "EAGAIN": "by_module",
            "EXDEV": "nesting.nested",
        }.items()
    }
