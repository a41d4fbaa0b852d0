"""Random calls, returns and ends of tasks on each shadow stack, compared with lists in Python."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.image.types_file import load_types
from emulated_kernel.kprobes.return_hook.guest_heap import GuestHeap, TaskFields
from emulated_kernel.kprobes.return_hook.ret_stack import RetStack
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.kprobes.return_hook.shadow_stack import ShadowStack
from emulated_kernel.util.abi import PAGE_SIZE
from tests.kept_images import load_image
from tests.sample import fewer

WORD = 8
CPUS = 3
TASKS = tuple(0x10_000 + 64 * number for number in range(3))
ABI = {
    "task_struct.rethooks": 8,
    "task_struct.ret_stack": 16,
    "percpu.base": 0x10_800,
    "percpu.current_task": 0,
}


@dataclass
class Pages:
    """The memory of a machine: one array, in which allocated pages follow the tasks."""

    data: bytearray = field(default_factory=lambda: bytearray(1 << 20))
    free: int = 0x20_000

    @property
    def memory(self) -> Pages:
        return self

    def view(self, va: int, size: int) -> memoryview:
        return memoryview(self.data)[va : va + size]

    def alloc_pages(self, size: int) -> int:
        va, self.free = self.free, self.free + size
        assert va % PAGE_SIZE == 0
        return va

    def free_pages(self, va: int) -> None:
        """Do nothing; freed pages are not used again."""


Act = tuple[str, int, int]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "call", "refuse", "return", "return", "exit", "remove"]),
        st.integers(0, len(TASKS) - 1),
        st.integers(0, 2),
    ),
    max_size=60,
)


def make(name: str) -> tuple[ShadowStack, GuestHeap]:
    pages = Pages()
    words = GuestHeap(pages, WORD)
    stack = SHADOW_STACKS[name](words, TaskFields(pages, ABI, WORD), CPUS)
    return stack, words


@pytest.mark.parametrize("name", list(SHADOW_STACKS))
@settings(max_examples=fewer(60, 3))
@given(acts=ACTS, nodes=st.integers(1, 5), size=st.sampled_from([0, 1, 8, 40]))
def test_what_is_pending_is_what_was_called(name: str, acts: list[Act], nodes: int, size: int) -> None:
    stack, words = make(name)
    hooks = [stack.add_hook(nodes, size) for _ in range(3)]
    removed: set[int] = set()
    pending: dict[int, list[tuple[int, int, int, bytes]]] = {task: [] for task in TASKS}
    counts = dict.fromkeys(hooks, 0)
    most, refused = counts, False
    for number, (act, which, choice) in enumerate(acts):
        task, hook = TASKS[which], hooks[choice]
        # Each node is freed on another CPU than the one that allocated the node.
        stack.tasks.cpu = number % CPUS
        if act in ("call", "refuse") and hook not in removed:
            node = stack.try_get(hook, task)
            if not isinstance(stack, RetStack):
                assert bool(node) == (counts[hook] < nodes), "a node is free exactly while not all are used"
            if node and act == "refuse":
                stack.put_back(hook, task, node)
                refused = True
            elif node:
                mark = bytes([number % 250 + 1]) * size
                stack.data(node, size)[:] = mark
                stack.push(hook, task, node, 0x1000 + number, 0x9000 + number)
                pending[task].insert(0, (hook, 0x1000 + number, 0x9000 + number, mark))
                counts[hook] += 1
        elif act == "return" and pending[task]:
            stack.pop(task, 1)
            counts[pending[task].pop(0)[0]] -= 1
        elif act == "exit":
            assert len(stack.flush(task)) == len(pending[task])
            for gone, *_ in pending[task]:
                counts[gone] -= 1
            pending[task] = []
        elif act == "remove" and hook not in removed:
            stack.remove_hook(hook)
            removed.add(hook)
        for each in TASKS:
            found = [
                (c.hook, c.ret_addr, c.frame, bytes(stack.data(c.node, size))) for c in stack.pending(each)
            ]
            assert found == pending[each]
        most = {hook: max(most[hook], number) for hook, number in counts.items()}
        there = [hook for hook, number in counts.items() if number or hook not in removed]
        assert {hook: stack.active(hook) for hook in stack.hooks} == {hook: counts[hook] for hook in there}
        # If nodes are counted, a node that is allocated and freed again counts as used.
        if not refused:
            assert {hook: stack.high_water(hook) for hook in there} == {hook: most[hook] for hook in there}
    for task in TASKS:
        stack.flush(task)
    for hook in set(hooks) - removed:
        stack.remove_hook(hook)
    stack.close()
    assert words.used == 0, "all memory comes back"


@pytest.mark.parametrize("name", ["rethook", "objpool"])
def test_a_debugger_can_follow_the_list_of_a_task(name: str) -> None:
    """The pending calls are found by the types of the image, as drgn's llist_for_each_entry does."""
    types = load_types(load_image(None, "x86_64").path)
    assert types is not None
    stack, words = make(name)
    task, hook = TASKS[0], stack.add_hook(3, 2 * WORD)
    pushed = [(0x1000, 0x9000), (0x2000, 0x8000)]
    for ret_addr, frame in pushed:
        stack.push(hook, task, stack.try_get(hook, task), ret_addr, frame)
    found = []
    link = int(stack.tasks.of(task, stack.field)[0])
    while link:
        call = link - types.offset("rethook_node.llist")
        assert words[call + types.offset("rethook_node.rethook")] == hook
        members = (f"rethook_node.{name}" for name in ("ret_addr", "frame"))
        found.append(tuple(words[call + types.offset(member)] for member in members))
        link = words[link + types.offset("llist_node.next")]
    assert found == pushed[::-1]
