"""Assembly code by which KernelCalls calls functions of an arm64 kernel; kernel_calls.py has x86's code."""

from __future__ import annotations

INTERRUPT = """
    00 01 00 58         | ldr x0, any_cpu_at
    21 01 00 58         | ldr x1, workqueue_at
    21 00 40 f9         | ldr x1, [x1]
    22 01 00 58         | ldr x2, work_at
    42 00 40 f9         | ldr x2, [x2]
    30 01 00 58         | ldr x16, queue_work_on_at
    00 02 1f d6         | br x16
    1f 20 03 d5         | nop
    imm64:any_cpu       | any_cpu_at: .quad any_cpu
    imm64:workqueue     | workqueue_at: .quad workqueue
    imm64:work          | work_at: .quad work
    imm64:queue_work_on | queue_work_on_at: .quad queue_work_on
"""
"""Code that the interrupt of KernelCalls runs: queue_work_on(any_cpu, *workqueue, *work)."""
MAKER = """
    fd 7b be a9                  | stp x29, x30, [sp, #-32]!
    f3 0b 00 f9                  | str x19, [sp, #16]
    13 00 02 d1                  | sub x19, x0, #128
    60 02 00 58                  | ldr x0, thread_at
    e1 03 13 aa                  | mov x1, x19
    02 00 80 12                  | mov w2, #-1
    43 02 00 58                  | ldr x3, name_at
    70 02 00 58                  | ldr x16, kthread_create_on_node_at
    00 02 3f d6                  | blr x16
    1f fc 3f b1                  | cmn x0, #4095
    a2 00 00 54                  | b.hs failed
    60 26 00 f9                  | str x0, [x19, #72]
    10 02 00 58                  | ldr x16, wake_up_process_at
    00 02 3f d6                  | blr x16
    04 00 00 14                  | b done
    60 1e 00 f9                  | failed: str x0, [x19, #56]
    49 00 80 d2                  | mov x9, #2
    69 22 00 f9                  | str x9, [x19, #64]
    f3 0b 40 f9                  | done: ldr x19, [sp, #16]
    fd 7b c2 a8                  | ldp x29, x30, [sp], #32
    c0 03 5f d6                  | ret
    1f 20 03 d5                  | nop
    imm64:thread                 | thread_at: .quad thread
    imm64:name                   | name_at: .quad name
    imm64:kthread_create_on_node | kthread_create_on_node_at: .quad kthread_create_on_node
    imm64:wake_up_process        | wake_up_process_at: .quad wake_up_process
"""
"""Code of the queued work_struct's function.

It creates the kernel thread and wakes it, or stores the error in the mailbox.

The mailbox is the memory with the data of the call; see kernel_calls.py.
"""
THREAD = """
    fd 7b be a9 | stp x29, x30, [sp, #-32]!
    f3 0b 00 f9 | str x19, [sp, #16]
    f3 03 00 aa | mov x19, x0
    70 02 40 a9 | ldp x16, x0, [x19]
    61 0a 41 a9 | ldp x1, x2, [x19, #16]
    63 12 42 a9 | ldp x3, x4, [x19, #32]
    65 1a 40 f9 | ldr x5, [x19, #48]
    00 02 3f d6 | blr x16
    60 1e 00 f9 | str x0, [x19, #56]
    29 00 80 d2 | mov x9, #1
    69 22 00 f9 | str x9, [x19, #64]
    00 00 80 d2 | mov x0, #0
    f3 0b 40 f9 | ldr x19, [sp, #16]
    fd 7b c2 a8 | ldp x29, x30, [sp], #32
    c0 03 5f d6 | ret
"""
"""Code of the thread: call the function whose address and arguments are in the mailbox; store the result."""
