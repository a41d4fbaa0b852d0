"""Lines of definitions, valid and invalid, and the answers of `kprobefs check` to them."""

from __future__ import annotations

from hypothesis import strategies as st

from kprobefs.definitions.syntax import Line
from kprobefs.plan.answer import Answer
from kprobefs.plan.check import check_lines
from kprobefs.plan.planned_kernel import planned_kernel

OWN = planned_kernel("x86_64", None, None, None)
heads = st.sampled_from(
    (
        *(
            "p",
            "r",
            "p:ev",
            "p:grp/ev",
            "r:ev",
            "r4:ev",
            "p4",
            "r0",
            "p:",
            "p:1x",
            "p:a/b/c",
            "r9999",
            "p:ev2",
        ),
        *("p:syscalls/sys_enter_read", "p:syscalls/sys_exit_read", "p:ftrace/print", "p:sched/sched_switch"),
        f"p:{'n' * 64}",
    )
)
places = st.sampled_from(
    (
        *("vfs_read", "vfs_read+5", "vfs_read+6", "vfs_read+0x1d", "vfs_raed", "jiffies", "0x10", "mod:f"),
        *("tcp_sendmsg+5", "tcp_sendmsg+7", "tcp_sendmsg", "int_sqrt%return", "int_sqrt%nix", "vfs_read+x"),
        *("do_group_exit", "kprobe_dispatcher", "memcpy", "vfs_read-1", "panic+3", "0xffffffff81000000"),
    )
)
arguments = st.lists(
    st.sampled_from(
        (
            *("$arg1", "a=%di", "a=%dx:u32", "b=$retval", "c=$stack1:x8", "=%di", "c=$foo", "d=+0(%di):u16"),
            *("d=+0(%di", "e=%xx", "f=@jiffies", "f=@nix", "g=%di:u7", "h=$comm", "i=%di:string"),
            *("j=$arg1:u8[99]", "k=\\1:s32"),
        )
    ),
    max_size=3,
)
lines = st.builds(
    lambda head, blanks, place, words: f"{head}{blanks}{place} {'  '.join(words)}".rstrip(),
    heads,
    st.sampled_from((" ", "   ")),
    places,
    arguments,
)


def checked(*texts: str) -> list[Answer]:
    return check_lines(OWN, [Line("x", number, text) for number, text in enumerate(texts, 1)])
