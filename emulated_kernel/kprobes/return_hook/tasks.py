"""TaskFields: the words of a task_struct that shadow stacks hang on, and who runs."""

from __future__ import annotations

from collections.abc import Mapping

from emulated_kernel.kprobes.return_hook.words import ViewedMemory

_KEPT = 1024
_FIELDS = ("rethooks", "ret_stack", "curr_ret_stack")
RETHOOKS, RET_STACK, CURR_RET_STACK = range(len(_FIELDS))
"""Indices of `TaskFields.of`."""
_FORMATS = {4: "I", 8: "Q"}


class TaskFields:
    """Finds the fields by task. An image without them has one shadow stack for all that runs.

    Mirrors: include/linux/sched.h:struct task_struct, rethooks, ret_stack, curr_ret_stack (v6.1).
    """

    def __init__(self, memory: ViewedMemory, abi: Mapping[str, int], word_size: int) -> None:
        self._memory = memory
        self._format = _FORMATS[word_size]
        self._word_size = word_size
        self._size = word_size * len(_FIELDS)
        self._known: dict[int, memoryview] = {}
        self._currents: dict[int, memoryview] = {}
        """By per-CPU area."""
        self._offset = abi.get("task_struct.rethooks")
        self._current: memoryview | None = None
        if self._offset is None:
            self._known[0] = self._words(memoryview(bytearray(self._size)))
            return
        offsets = [abi[f"task_struct.{name}"] - self._offset for name in _FIELDS]
        assert offsets == [word_size * number for number in range(len(_FIELDS))], "they aren't in a row"
        self._current_at = abi["percpu.current_task"]
        self.look_from(abi["percpu.base"])

    def look_from(self, area: int) -> None:
        """The CPU with this per-CPU area is the current one."""
        current = self._currents.get(area)
        if current is None and self._offset is not None:
            current = self._words(self._memory.view(area + self._current_at, self._word_size))
            self._currents[area] = current
        self._current = current

    def _words(self, view: memoryview) -> memoryview:
        return view.cast(self._format)  # type: ignore[call-overload, no-any-return]

    def current(self) -> int:
        """The task that runs on the CPU."""
        return 0 if self._current is None else int(self._current[0])

    def of(self, task: int) -> memoryview:
        """The live words of a task, by RETHOOKS, RET_STACK and CURR_RET_STACK."""
        fields = self._known.get(task)
        if fields is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            assert self._offset is not None, "there is one task only"
            fields = self._words(self._memory.view(task + self._offset, self._size))
            self._known[task] = fields
        return fields
