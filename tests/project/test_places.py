"""Names agree in tables, documents and the kernel: those of files, types, triggers, profiles and
architectures.
"""

from __future__ import annotations

import argparse
import inspect
import os
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from emulated_kernel.arch import architectures
from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.arch.architectures import arch_named
from emulated_kernel.arch.x86.emulate import X86Emulation
from emulated_kernel.arch.x86.insn_attributes import DecodeCache
from emulated_kernel.image.build_images import TARGETS
from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes import return_hook
from emulated_kernel.kprobes.profile import PROFILES, RETURN_HOOKS, STRATEGIES, profile_named
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.kprobes.return_hook.shadow_stack import ShadowStack
from emulated_kernel.machine import cpu_parts as cpu_parts_module
from emulated_kernel.machine.cpu_parts import cpu_parts
from emulated_kernel.trace.compiled.fetch import _EMITTERS
from emulated_kernel.trace.fetch.fetch_types import SymbolString, fetch_types
from emulated_kernel.trace.interface import INTERFACES, Interface
from emulated_kernel.trace.ring.trace_clock import TRACE_CLOCKS
from emulated_kernel.trace.trigger.commands import PLAIN_COMMANDS
from emulated_kernel.util.config import ARCHITECTURES, ELF_MACHINES
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.trees.readme import readme_text
from kprobefs.cli.main import COMMANDS
from kprobefs.cli.parser import program_parser
from kprobefs.measure.verdicts import LINUX_RULES

ROOT = Path(__file__).resolve().parents[2]
MANUAL = "".join(path.read_text().replace("\\-", "-") for path in sorted((ROOT / "docs/man").iterdir()))
DOCUMENTS = (
    "CONTRIBUTING.md",
    "README.md",
    *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)

_PATH = re.compile(r"`([a-z_][\w.]*(?:/[\w.]+)*/?)`")
"""A path in backticks."""


def named_paths(text: str) -> set[str]:
    """Return the paths of Python files and of the library's packages in the text of a document."""
    return {
        path
        for path in _PATH.findall(text)
        if "/" in path and (path.endswith(".py") or path.startswith("emulated_kernel/"))
    }


def exists(path: str) -> bool:
    """Return True if the path exists; documents may leave out a leading `emulated_kernel/`."""
    return any((base / path).exists() for base in (ROOT, ROOT / "emulated_kernel"))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_places_that_exist(document: str) -> None:
    assert [path for path in named_paths((ROOT / document).read_text()) if not exists(path)] == []


def test_paths_are_found_in_a_document() -> None:
    text = "In `arch/nowhere.py` and `emulated_kernel/nowhere/`, not in `kprobes/list` or `nowhere.py`."
    assert named_paths(text) == {"arch/nowhere.py", "emulated_kernel/nowhere/"}


def is_in_manual(name: str) -> bool:
    """Return True if a line in bold or italics of a manual page contains the word."""
    return any(name in re.findall(r"[\w./*]+", line) for line in re.findall(r"^\.[BI]\w? (.*)", MANUAL, re.M))


def choices(option: str, command: str) -> tuple[str, ...]:
    """Return the values that an option of a command accepts."""
    (commands,) = (each for each in program_parser()._actions if isinstance(each, argparse._SubParsersAction))
    (action,) = (each for each in commands.choices[command]._actions if option in each.option_strings)
    assert action.choices is not None
    return tuple(action.choices)


def files_below(path: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file in the directory `path`, after a kprobe and a return probe
    were defined.
    """
    client = Client(pid=0, uid=0, gid=0)
    with Kernel() as kernel, kernel.lock:
        kernel.tracing.kprobe_events.write(b"p:g/e vfs_read\nr:g/e_return vfs_read\n")
        files = kernel.filesystem()
        for entry in files.readdir(path)[2:]:
            opened = files.open(f"{path}/{entry.name}", os.O_RDONLY, client)
            yield entry.name, opened.read(1 << 20, 0).decode("latin1")
            opened.release()


def test_stats_files_are_in_the_manual_and_the_reference() -> None:
    """A return probe has all files of a kprobe and more.

    The manual and the reference name all these files.
    """
    of_probes, of_returns = (dict(files_below(f"/kprobes/stats/g/{name}")) for name in ("e", "e_return"))
    assert of_probes.keys() < of_returns.keys()
    assert "vfs_read+0x0/" in of_returns["address"]
    assert [name for name in of_returns if not is_in_manual(name)] == []
    (row,) = re.findall(
        r"^\| `kprobes/stats/GROUP/EVENT/` .*", (ROOT / "docs/reference/files.md").read_text(), re.M
    )
    assert [name for name in of_returns if f"`{name}`" not in row] == []


def test_machine_files_are_in_the_manual() -> None:
    texts = dict(files_below("/machine"))
    assert [name for name in texts if not is_in_manual(name)] == []
    assert {name for name, text in texts.items() if not text} <= {"modules", "load", "call"}


def test_tracefs_has_the_files_of_its_instances() -> None:
    with Kernel() as kernel, kernel.lock:
        kernel.trace_arrays.make("one")
        files = kernel.filesystem()
        top, instance = (
            {entry.name for entry in files.readdir(path)} for path in ("/tracing", "/tracing/instances/one")
        )
        assert instance < top


def test_guest_code_fetches_each_type_but_symbol_strings() -> None:
    kinds = {type(each) for interface in INTERFACES.values() for each in fetch_types(8, interface).values()}
    assert kinds - _EMITTERS.keys() == {SymbolString}
    assert _EMITTERS.keys() <= kinds


@pytest.mark.parametrize("interface", INTERFACES.values(), ids=lambda each: each.name)
def test_the_readme_of_tracefs_lists_each_fetch_type(interface: Interface) -> None:
    shown = re.search(r"^ *type: (.*?)\n *s:", readme_text(interface), re.DOTALL | re.MULTILINE)
    assert shown is not None
    listed = set(re.findall(r"\w+", shown[1]))
    for prefix, bits in re.findall(r"\b([sux])([\d/]+)", shown[1]):
        listed |= {prefix + each for each in bits.split("/")}
    types = fetch_types(8, interface)
    assert listed >= types.keys()
    for name, each in types.items():
        assert (each.name, bool(each.print_fmt), bool(each.field_type)) == (name, True, True)


def test_trigger_files_list_each_command() -> None:
    with Kernel() as kernel, kernel.lock:
        event = kernel.tracing.system.events.find("sched", "sched_switch")
        assert event is not None
        (shown,) = kernel.trace_arrays.top.triggers.records(event)
        names = [command.name for command in PLAIN_COMMANDS]
        assert shown == f"# Available triggers:\n# {' '.join([*names, 'hist'])}\n"


def test_each_trace_clock_can_be_chosen() -> None:
    with Kernel() as kernel, kernel.lock:
        for clock in TRACE_CLOCKS:
            kernel.trace.set_clock(clock.name)
            assert f"[{clock.name}]" in kernel.trace.clock_text()
            assert kernel.trace.now() <= kernel.trace.now()


def test_reasons_that_refuse_a_probe_have_an_errno() -> None:
    """A reason that refuses a probe has an errno, and a reason that only prevents a jump has none.

    All texts of reasons differ.
    """
    assert len({reason.value for reason in RejectReason}) == len(RejectReason)
    reasons = list(RejectReason)
    first_of_jumps = reasons.index(RejectReason.NOT_BUILT)
    assert all(reason.errno for reason in reasons[:first_of_jumps])
    assert not any(reason.errno for reason in reasons[first_of_jumps:])


def test_each_strategy_is_in_a_profile_or_in_coverage() -> None:
    rules = {strategy for name in ARCHITECTURES for strategy in arch_named(name).strategies}
    named = {strategy for profile in PROFILES.values() for strategy in profile.strategies}
    assert rules == named | set(LINUX_RULES.values()) | set(STRATEGIES)


def test_each_profile_is_documented() -> None:
    assert all(profile_named(name).name == name for name in PROFILES)
    assert [name for name in PROFILES if name not in MANUAL + (ROOT / "README.md").read_text()] == []


def test_each_shadow_stack_can_be_chosen_and_is_documented() -> None:
    for module in pkgutil.iter_modules(return_hook.__path__, f"{return_hook.__name__}."):
        import_module(module.name)
    found = [each.name for each in subclasses(ShadowStack) if not inspect.isabstract(each)]
    assert sorted(found) == sorted(RETURN_HOOKS)
    assert tuple(SHADOW_STACKS) == RETURN_HOOKS == choices("--return-hook", "mount")
    assert {profile.return_hook for profile in PROFILES.values()} <= set(RETURN_HOOKS)
    documented = (ROOT / "docs/reference/return-hooks.md").read_text()
    with Kernel() as kernel, kernel.lock:
        hooks = kernel.kretprobes.hooks
        for name in SHADOW_STACKS:
            hooks.select_return_hook(name)
            assert hooks.return_hook == name
            assert name in documented


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yield the direct and indirect subclasses of a class."""
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_each_architecture_is_complete() -> None:
    """Each architecture is known everywhere: in the hooks, the CPU models, the images, the command line and
    the manual.
    """
    archs = {arch.name for family in architectures._FAMILIES.values() for arch in family()}
    models = {parts.model.name for family in cpu_parts_module._FAMILIES.values() for parts in family()}
    # Distributions' kernels have one architecture more than kprobefs's own.
    assert archs == ELF_MACHINES.keys()
    assert models == ARCHITECTURES.keys()
    assert architectures._FAMILIES.keys() == set(ELF_MACHINES.values())
    assert cpu_parts_module._FAMILIES.keys() == set(ARCHITECTURES.values())
    images = {path.parent.name for path in PREBUILT.glob("*/modules")}
    assert images == {name for name, target in TARGETS.items() if target.has_modules} == models
    assert list(choices("--arch", "mount")) == list(ARCHITECTURES)
    for name in ARCHITECTURES:
        assert cpu_parts(name).model.name == arch_named(name).name == name
        assert arch_named(name).strategies
        assert is_in_manual(name)


def test_each_command_is_in_the_manual() -> None:
    (commands,) = (each for each in program_parser()._actions if isinstance(each, argparse._SubParsersAction))
    assert list(commands.choices) == list(COMMANDS)
    assert [name for name in COMMANDS if name not in MANUAL] == []


def test_each_group_of_events_is_in_the_page_of_differences() -> None:
    documented = (ROOT / "docs/reference/compatibility.md").read_text()
    with Kernel() as kernel:
        groups = {event.group for event in kernel.tracing.system.events}
    assert groups > {"sched", "syscalls", "raw_syscalls"}
    assert groups <= set(re.findall(r"`(?:tracing/events/)?(\w+)`", documented))


@pytest.mark.parametrize(
    "head",
    ["fa", "fb", "9c", "9d", "c3", "cb", "e8", "eb", "74", "e0", "e2", "e3", "ffd0", "ffe0"],
)
def test_instructions_that_cannot_run_elsewhere_are_emulated(head: str) -> None:
    code = bytes.fromhex(head).ljust(16, b"\x90")
    assert isinstance(arch_named("x86_64").prepare(code, 0x1000, 0x2000).emulate, X86Emulation)


def test_instructions_that_are_not_emulated_either_are_refused() -> None:
    facts = DecodeCache(64).all(bytes.fromhex("cf 90 55 0f0b"), 0x1000, 2)
    found = [(each.refusal is not None, each.is_ud2) for each in facts.values()]
    assert found == [(True, False), (False, False), (False, False), (False, True)]
