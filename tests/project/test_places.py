"""The places that CONTRIBUTING and the documents name: each is there, and each architecture fills it."""

from __future__ import annotations

import argparse
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from emulated_kernel.arch import architectures
from emulated_kernel.arch.analysis.reason import Reason
from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.arch.x86 import emulate
from emulated_kernel.arch.x86.emulate import X86Emulation
from emulated_kernel.arch.x86.facts import FactsTable
from emulated_kernel.config import ARCHITECTURES, ElfMachine
from emulated_kernel.host.builtin_kernel import BuiltinKernel
from emulated_kernel.image.build import TARGETS
from emulated_kernel.image.image import PREBUILT
from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes import return_hook
from emulated_kernel.kprobes.profile import PROFILES, RETURN_HOOKS, profile_named
from emulated_kernel.kprobes.return_hook.base import ShadowStack
from emulated_kernel.kprobes.return_hook.hooks import SHADOW_STACKS
from emulated_kernel.machine import cpus
from emulated_kernel.machine.cpus import cpu_parts
from emulated_kernel.trace.compiled.fetch import _EMITTERS
from emulated_kernel.trace.fetch.types import SymbolString, fetch_types
from emulated_kernel.trace.ring.clock import TRACE_CLOCKS
from emulated_kernel.trace.trigger.commands import PLAIN_COMMANDS
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.trees.readme import README
from kprobefs.arguments import program_parser
from kprobefs.cli import COMMANDS
from kprobefs.coverage import _LINUX_RULES

ROOT = Path(__file__).resolve().parents[2]
MANUAL = "".join(path.read_text().replace("\\-", "-") for path in sorted((ROOT / "docs/man").iterdir()))
DOCUMENTS = (
    "CONTRIBUTING.md",
    "README.md",
    *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)

_PATH = re.compile(r"`([a-z_][\w.]*(?:/[\w.]+)*/?)`")
"""In backticks, with a slash or the ending of a Python file."""


def named_paths(document: str) -> set[str]:
    """Python files and packages of the project that a document names, as they stand there."""
    found = {match[1] for match in _PATH.finditer((ROOT / document).read_text())}
    return {
        path
        for path in found
        if "/" in path and (path.endswith(".py") or path.startswith("emulated_kernel/"))
    }


def exists(path: str) -> bool:
    """Documents leave `emulated_kernel/` out, and scripts that the reader runs are as they are."""
    return any((base / path).exists() for base in (ROOT, ROOT / "emulated_kernel"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_places_that_exist(document: str) -> None:
    assert [path for path in named_paths(document) if not exists(path)] == []


def test_the_table_of_places_has_paths() -> None:
    assert len(named_paths("CONTRIBUTING.md")) > 15


def filled_strategies() -> None:
    """A profile names it, or it is what coverage counts by."""
    rules = {strategy for name in ARCHITECTURES for strategy in arch_named(name).strategies}
    named = {strategy for profile in PROFILES.values() for strategy in profile.strategies}
    assert rules == named | set(_LINUX_RULES.values())


def filled_architectures() -> None:
    """Whatever a family has is in the list, and whatever is in the list each of them has."""
    archs = {arch.name for family in architectures._FAMILIES.values() for arch in family()}
    models = {parts.model.name for family in cpus._FAMILIES.values() for parts in family()}
    assert archs == models == ARCHITECTURES.keys()
    assert architectures._FAMILIES.keys() == cpus._FAMILIES.keys() == set(ElfMachine)
    images = {path.parent.name for path in PREBUILT.glob("*/modules")}
    assert images == {name for name, target in TARGETS.items() if target.has_modules} == archs
    assert list(choices("--arch", "mount")) == list(ARCHITECTURES)
    for name in ARCHITECTURES:
        assert cpu_parts(name).model.name == arch_named(name).name == name
        assert arch_named(name).strategies
        assert is_in_manual(name)


def choices(option: str, command: str) -> tuple[str, ...]:
    """What the command line takes for an option of a command."""
    (commands,) = (each for each in program_parser()._actions if isinstance(each, argparse._SubParsersAction))
    (action,) = (each for each in commands.choices[command]._actions if option in each.option_strings)
    assert action.choices is not None
    return tuple(action.choices)


def files_below(path: str) -> Iterator[tuple[str, str]]:
    """Name and text of each file of a directory of ours, with a probe of each kind defined."""
    client = Client(pid=0, uid=0, gid=0)
    with Kernel() as kernel, kernel.lock:
        kernel.tracing.kprobe_events.write(b"p:g/e vfs_read\nr:g/e_return vfs_read\n")
        files = kernel.filesystem()
        for entry in files.readdir(path)[2:]:
            opened = files.open(f"{path}/{entry.name}", os.O_RDONLY, client)
            yield entry.name, opened.read(1 << 20, 0).decode()
            opened.release()


def is_in_manual(name: str) -> bool:
    """Whether it is one of the words that a page sets apart."""
    return any(name in re.findall(r"[\w./*]+", line) for line in re.findall(r"^\.[BI]\w? (.*)", MANUAL, re.M))


def filled_stats_files() -> None:
    """Each is shown of a return probe, and those of every probe of others too; manual and README have all."""
    of_probes, of_returns = (dict(files_below(f"/kprobes/stats/g/{name}")) for name in ("e", "e_return"))
    assert of_probes.keys() < of_returns.keys()
    assert "vfs_read+0x0/" in of_returns["address"]
    assert [name for name in of_returns if not is_in_manual(name)] == []
    (row,) = re.findall(r"^\| `kprobes/stats/GROUP/EVENT/` .*", (ROOT / "README.md").read_text(), re.M)
    assert [name for name in of_returns if f"`{name}`" not in row] == []


def filled_machine_files() -> None:
    texts = dict(files_below("/machine"))
    assert [name for name in texts if not is_in_manual(name)] == []
    assert {name for name, text in texts.items() if not text} <= {"modules", "load", "call"}


def filled_tracefs_files() -> None:
    """What instances have too, the top directory has."""
    with Kernel() as kernel, kernel.lock:
        kernel.trace_arrays.make("one")
        files = kernel.filesystem()
        top, instance = (
            {entry.name for entry in files.readdir(path)} for path in ("/tracing", "/tracing/instances/one")
        )
        assert instance < top


def filled_fetch_types() -> None:
    """Guest code fetches all kinds but the one that looks a symbol up."""
    kinds = {type(each) for each in fetch_types(8).values()}
    assert kinds - _EMITTERS.keys() == {SymbolString}
    assert _EMITTERS.keys() <= kinds
    shown = re.search(r"^ *type: (.*?)\n *s:", README, re.DOTALL | re.MULTILINE)
    assert shown is not None
    told = set(re.findall(r"\w+", shown[1]))
    for prefix, bits in re.findall(r"\b([sux])([\d/]+)", shown[1]):
        told |= {prefix + each for each in bits.split("/")}
    assert told >= fetch_types(8).keys()
    for name, each in fetch_types(8).items():
        assert (each.name, bool(each.print_fmt), bool(each.field_type)) == (name, True, True)


def filled_triggers() -> None:
    with Kernel() as kernel, kernel.lock:
        triggers, event = (
            kernel.trace_arrays.top.triggers,
            kernel.tracing.system.events.find("sched", "sched_switch"),
        )
        assert event is not None
        (shown,) = triggers.records(event)
        names = [command.name for command in PLAIN_COMMANDS]
        assert shown == f"# Available triggers:\n# {' '.join([*names, 'hist'])}\n"


def filled_clocks() -> None:
    with Kernel() as kernel, kernel.lock:
        for clock in TRACE_CLOCKS:
            kernel.trace.set_clock(clock.name)
            assert f"[{clock.name}]" in kernel.trace.clock_text()
            assert kernel.trace.now() <= kernel.trace.now()


def filled_rules() -> None:
    """Each has a text of its own, and those before the blank line, which keep probes out, an errno."""
    assert len({reason.value for reason in Reason}) == len(Reason)
    reasons = list(Reason)
    keep_out, others = reasons[: reasons.index(Reason.NOT_BUILT)], reasons[reasons.index(Reason.NOT_BUILT) :]
    assert all(reason.errno for reason in keep_out)
    assert not any(reason.errno for reason in others)


def filled_profiles() -> None:
    assert all(profile_named(name).name == name for name in PROFILES)
    assert [name for name in PROFILES if name not in MANUAL + (ROOT / "README.md").read_text()] == []


def filled_shadow_stacks() -> None:
    """Each class of the room is in the list, which the engine and the program take it from."""
    for module in pkgutil.iter_modules(return_hook.__path__, f"{return_hook.__name__}."):
        import_module(module.name)
    there = [each.name for each in subclasses(ShadowStack) if not inspect.isabstract(each)]
    assert sorted(there) == sorted(RETURN_HOOKS)
    assert tuple(SHADOW_STACKS) == RETURN_HOOKS == choices("--return-hook", "mount")
    assert {profile.return_hook for profile in PROFILES.values()} <= set(RETURN_HOOKS)
    documented = (ROOT / "docs/return-hooks.md").read_text()
    with Kernel() as kernel, kernel.lock:
        hooks = kernel.kretprobes.hooks
        for name in SHADOW_STACKS:
            hooks.select_return_hook(name)
            assert hooks.return_hook == name
            assert name in documented


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """All of them, at any depth."""
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def filled_guest_questions() -> None:
    """Each says what is asked; who answers for either make of kernel is there."""
    asked = [name for name in vars(BuiltinKernel) if not name.startswith("_")]
    assert [name for name in asked if not inspect.getdoc(getattr(BuiltinKernel, name))] == []
    document = (ROOT / "docs/architecture.md").read_text()
    table = document.partition("| asked | our kernel | a distribution's kernel |")[2].partition("\n\n")[0]
    told = set(re.findall(r"`(?:\w+\.)?(\w+)", table))
    text = "\n".join(path.read_text() for path in (ROOT / "emulated_kernel").rglob("*.py"))
    defined = set(re.findall(r"(?:class|def|^ +self\.|^ {4})\b *(\w+)(?:\(|:| =)", text, re.MULTILINE))
    assert len(told) > 30
    assert sorted(told - defined) == []


def filled_commands() -> None:
    found = [action for action in program_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    (commands,) = found
    assert list(commands.choices) == list(COMMANDS)
    for name in COMMANDS:
        assert name in MANUAL, name


def filled_static_events() -> None:
    """Each event of the image's headers is the kernel's, and its group in the page of what differs."""
    headers = (ROOT / "emulated_kernel/image/src/include/trace").glob("*.h")
    pattern = r"^(?:TRACE_EVENT\w*\(|DEFINE_EVENT\w*\(\w+, )(\w+)"
    names = [name for path in headers for name in re.findall(pattern, path.read_text(), re.MULTILINE)]
    assert len(names) > 60
    documented = (ROOT / "docs/compatibility.md").read_text()
    with Kernel() as kernel:
        groups = {event.name: event.group for event in kernel.tracing.system.events}
    assert [name for name in names if name not in groups] == []
    told = set(re.findall(r"`(?:tracing/events/)?(\w+)`", documented))
    assert {groups[name] for name in names} <= told


EMULATED = ["fa", "fb", "9c", "9d", "c3", "cb", "e8", "eb", "74", "e0", "e2", "e3", "ffd0", "ffe0"]
"""Heads of x86 instructions that can't run elsewhere, one at least for each way of emulating."""


def filled_x86_rules() -> None:
    """What can't run elsewhere is emulated, or there is a reason among its facts; all else is copied."""
    arch = arch_named("x86_64")
    used = set()
    for head in EMULATED:
        emulation = arch.prepare(bytes.fromhex(head).ljust(16, b"\x90"), 0x1000, 0x2000).emulate
        assert isinstance(emulation, X86Emulation)
        used.add(emulation.op.__name__)
    there = set(re.findall(r"^def ([a-z]\w*)\(insn", Path(emulate.__file__).read_text(), re.MULTILINE))
    assert there <= used
    facts = FactsTable(64).all(bytes.fromhex("cf 90 55 0f0b"), 0x1000, 2)
    told = [(each.refusal is not None, each.is_ud2) for each in facts.values()]
    assert told == [(True, False), (False, False), (False, False), (False, True)]


FILLED: dict[str, Callable[[], None]] = {
    "a file of `kprobes/stats/GROUP/EVENT/`": filled_stats_files,
    "a file of `machine/`": filled_machine_files,
    "a file of tracefs": filled_tracefs_files,
    "a type of fetch arguments": filled_fetch_types,
    "an event of the emulated kernel": filled_static_events,
    "the rule of an x86 instruction": filled_x86_rules,
    "a trigger": filled_triggers,
    "a clock of `trace_clock`": filled_clocks,
    "a rule that keeps probes out, or jumps": filled_rules,
    "a strategy of optimizing": filled_strategies,
    "a profile": filled_profiles,
    "a shadow stack": filled_shadow_stacks,
    "an architecture": filled_architectures,
    "a question to the guest's kernel": filled_guest_questions,
    "a command of the program": filled_commands,
}
"""How each row of CONTRIBUTING's table is seen to be filled by all that there are of it."""


def test_each_row_of_the_table_has_its_check() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| what | where | how |")[2].partition("\n\n")[0]
    assert [row.split("|")[1].strip() for row in table.splitlines()[2:]] == list(FILLED)


@pytest.mark.parametrize("what", FILLED)
def test_all_there_are_fill_their_places(what: str) -> None:
    FILLED[what]()
