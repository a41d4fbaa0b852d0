"""Shadow stacks in which the guest has damaged a word: every operation ends, and later operations work."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from emulated_kernel.kprobes.return_hook.guest_heap import GuestHeap, TaskFields
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.kprobes.return_hook.shadow_stack import ShadowStack
from emulated_kernel.machine.traps.trap import MemoryFault
from tests.kprobes.return_hook import test_shadow_stacks
from tests.kprobes.return_hook.test_shadow_stacks import ABI, CPUS, TASKS, WORD
from tests.sample import WHOLE

NODES = 4
MAX_CALLS = 3 * NODES * len(TASKS)


@dataclass
class Pages(test_shadow_stacks.Pages):
    """The memory of a machine. An access past the end raises MemoryFault."""

    @property
    def memory(self) -> Pages:
        return self

    def view(self, va: int, size: int) -> memoryview:
        if not 0 <= va <= len(self.data) - size:
            raise MemoryFault(va)
        return super().view(va, size)


def filled(kind: type[ShadowStack]) -> tuple[Pages, ShadowStack, list[int]]:
    """Return the memory, a shadow stack in it, and its two hooks.

    Each task is in two calls, and the first hook has a free node that was in use.
    """
    pages = Pages()
    stack = kind(GuestHeap(pages, WORD), TaskFields(pages, ABI, WORD), CPUS)
    hooks = [stack.add_hook(NODES, 16) for _ in range(2)]
    for task in TASKS:
        for number, hook in enumerate(hooks):
            push(stack, hook, task, number)
    stack.pop(TASKS[0], 1)
    return pages, stack, hooks


def push(stack: ShadowStack, hook: int, task: int, number: int = 0) -> None:
    node = stack.try_get(hook, task)
    if node:
        stack.push(hook, task, node, 0x1000 + number, 0x9000 + number)


def uses(stack: ShadowStack, hooks: list[int]) -> list[Callable[[], object]]:
    """Return the operations of the host on a shadow stack, which must all end."""
    found: list[Callable[[], object]] = []
    for task in TASKS:
        found += [
            lambda task=task: list(stack.pending(task)),  # type: ignore[misc]
            lambda task=task: push(stack, hooks[0], task),  # type: ignore[misc]
            lambda task=task: stack.pop(task, 1),  # type: ignore[misc]
        ]
    found += [lambda: stack.active(hooks[0]), lambda: stack.high_water(hooks[1]), lambda: stack.is_locked]
    found += [lambda task=task: stack.flush(task) for task in TASKS]  # type: ignore[misc]
    return [*found, *(lambda hook=hook: stack.remove_hook(hook) for hook in hooks)]  # type: ignore[misc]


@pytest.mark.parametrize("name", SHADOW_STACKS)
def test_each_damaged_word(name: str) -> None:
    pages, *_ = filled(SHADOW_STACKS[name])
    places = [at for at in range(0, pages.free, WORD) if any(pages.data[at : at + WORD])]
    places += [
        task + ABI[field] for task in TASKS for field in ("task_struct.rethooks", "task_struct.ret_stack")
    ]
    values = [*places[:4], *places[-4:], 0, 1, 3, 1 << 20, 0x1234_5678_9ABC_DEF0, (1 << 64) - 1]
    cases = [(place, value) for place in places for value in (place, place + WORD, place + 3, *values)]
    for place, value in cases if WHOLE else random.Random(3).sample(cases, 400):
        pages, stack, hooks = filled(SHADOW_STACKS[name])
        pages.data[place : place + WORD] = value.to_bytes(WORD, "little")
        for use in uses(stack, hooks):
            found = use()
            assert not isinstance(found, list) or len(found) <= MAX_CALLS


@pytest.mark.parametrize("name", SHADOW_STACKS)
def test_a_damaged_task_does_not_concern_others(name: str) -> None:
    pages, stack, hooks = filled(SHADOW_STACKS[name])
    victim, other = TASKS[1:]
    before = list(stack.pending(other))
    assert len(before) == len(hooks)
    for field in ("task_struct.rethooks", "task_struct.ret_stack"):
        at = victim + ABI[field]
        pages.data[at : at + WORD] = b"A" * WORD
    stack.flush(victim)
    assert list(stack.pending(other)) == before
    assert len(stack.flush(other)) == len(hooks)
