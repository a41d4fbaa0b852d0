"""The number of arguments of each function, which is read from notes that the compiler writes."""

from __future__ import annotations

import pytest

from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.image.prototypes import argument_counts, load_argument_counts, to_json

NOTES = """\
/* include/printk.h:33:NC */ extern int _printk (const char *, ...);
/* a.c:1:NF */ static void nothing (void); /* () */
/* a.c:2:NF */ extern struct task *make (int (*threadfn) (void *, int), void *data); /* (threadfn, data) */
/* a.c:3:NF */ static int twin (int a, int b); /* (a, b) int a; int b; */
/* b.c:3:NF */ static int twin (int a); /* (a) int a; */
/* b.c:4:IC */ extern int implicit ();
not a note
"""


def test_named_parameters_are_counted() -> None:
    assert argument_counts([NOTES]) == {"_printk": 1, "nothing": 0, "make": 2, "twin": 1}


def test_only_what_the_image_has_is_kept() -> None:
    assert to_json({"b": 2, "a": 1, "c": 3}, ["b", "a", "none"]) == '{\n"a": 1,\n"b": 2\n}\n'


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
def test_of_the_prebuilt_images(arch: str) -> None:
    counts = load_argument_counts(PREBUILT / arch / "vmlinux")
    assert {name: counts[name] for name in ("vfs_read", "memcpy", "strlen", "_printk", "ktgt_add")} == {
        "vfs_read": 4,
        "memcpy": 3,
        "strlen": 1,
        "_printk": 1,
        "ktgt_add": 2,
    }


def test_of_an_image_without_notes() -> None:
    assert load_argument_counts(PREBUILT / "none" / "vmlinux") == {}
