"""Code of the trampoline that armed fentry sites of an arm64 kernel call.

The instruction before an fentry site copies the link register to x9. The call at the site then overwrites the
link register. The trampoline saves a struct user_pt_regs, in which x30 is the link register of the traced
function. It may change x9, x10 and the flags, as Linux's own trampoline may.
Mirrors: arch/arm64/kernel/entry-ftrace.S:ftrace_caller (v6.12)
"""

from __future__ import annotations

SAVE = """
    ff 43 04 d1 | sub sp, sp, #272
    e0 07 00 a9 | stp x0, x1, [sp, #0]
    e2 0f 01 a9 | stp x2, x3, [sp, #16]
    e4 17 02 a9 | stp x4, x5, [sp, #32]
    e6 1f 03 a9 | stp x6, x7, [sp, #48]
    e8 27 04 a9 | stp x8, x9, [sp, #64]
    ea 2f 05 a9 | stp x10, x11, [sp, #80]
    ec 37 06 a9 | stp x12, x13, [sp, #96]
    ee 3f 07 a9 | stp x14, x15, [sp, #112]
    f0 47 08 a9 | stp x16, x17, [sp, #128]
    f2 4f 09 a9 | stp x18, x19, [sp, #144]
    f4 57 0a a9 | stp x20, x21, [sp, #160]
    f6 5f 0b a9 | stp x22, x23, [sp, #176]
    f8 67 0c a9 | stp x24, x25, [sp, #192]
    fa 6f 0d a9 | stp x26, x27, [sp, #208]
    fc 77 0e a9 | stp x28, x29, [sp, #224]
    e9 7b 00 f9 | str x9, [sp, #240]
    ea 43 04 91 | add x10, sp, #272
    ea fb 0f a9 | stp x10, x30, [sp, #248]
    2a 42 3b d5 | mrs x10, daif
    0b 42 3b d5 | mrs x11, nzcv
    4a 01 0b aa | orr x10, x10, x11
    ab 00 80 d2 | mov x11, #5
    4a 01 0b aa | orr x10, x10, x11
    ea 87 00 f9 | str x10, [sp, #264]
"""
RESTORE = """
    e0 07 40 a9 | ldp x0, x1, [sp, #0]
    e2 0f 41 a9 | ldp x2, x3, [sp, #16]
    e4 17 42 a9 | ldp x4, x5, [sp, #32]
    e6 1f 43 a9 | ldp x6, x7, [sp, #48]
    e8 27 44 a9 | ldp x8, x9, [sp, #64]
    ea 2f 45 a9 | ldp x10, x11, [sp, #80]
    ec 37 46 a9 | ldp x12, x13, [sp, #96]
    ee 3f 47 a9 | ldp x14, x15, [sp, #112]
    f0 47 48 a9 | ldp x16, x17, [sp, #128]
    f2 4f 49 a9 | ldp x18, x19, [sp, #144]
    f4 57 4a a9 | ldp x20, x21, [sp, #160]
    f6 5f 4b a9 | ldp x22, x23, [sp, #176]
    f8 67 4c a9 | ldp x24, x25, [sp, #192]
    fa 6f 4d a9 | ldp x26, x27, [sp, #208]
    fc 77 4e a9 | ldp x28, x29, [sp, #224]
    fe 7b 40 f9 | ldr x30, [sp, #240]
    ea a7 4f a9 | ldp x10, x9, [sp, #248]
    5f 01 00 91 | mov sp, x10
    20 01 5f d6 | ret x9
"""
