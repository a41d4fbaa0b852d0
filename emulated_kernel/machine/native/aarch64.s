// Dispatch of a guest's traps and its rdtsc on an AArch64 host; x86_64.s has the same routines with more comments.

// Macros, as in x86_64.s.

.macro count_hit words
    ldr x6, [\words, #{hits}]
    add x6, x6, #1
    str x6, [\words, #{hits}]
.endm

// The address is in x4. The target is left in x7.
.macro search words, table, shift, entries
    ldr x6, [\words, #{python}]
    ldr x7, [\words, #{callers}]
    orr x6, x6, x7
    cbnz x6, python
    movz x6, #{factor_0}
    movk x6, #{factor_1}, lsl #16
    movk x6, #{factor_2}, lsl #32
    movk x6, #{factor_3}, lsl #48
    mul x6, x6, x4
    ldr w7, [\table, #\shift]
    lsr x6, x6, x7
    ldr x7, [\table, #\entries]
    add x6, x7, x6, lsl #4
next:
    ldr x7, [x6]
    cmp x7, x4
    b.eq found
    add x6, x6, #16
    cbnz x7, next
    b python
found:
    ldr x7, [x6, #8]
    cbz x7, python
    count_hit \words
.endm

// The address of the LinkWords is in x7. The target is left in x7.
.macro follow_link
    sub x7, x7, #{linked}
    ldr x4, [x7, #{target_register}]
    ldr x4, [x4]
    ldr x5, [x7, #{added}]
    add x4, x4, x5
    ldr x5, [x7, #{kept_bits}]
    and x4, x4, x5
    ldr x5, [x7, #{link_register}]
    ldr x6, [x7, #{link}]
    str x6, [x5]
    mov x7, x4
.endm

.macro charge words, ns, next
    ldr x3, [\words, #{time}]
    ldr x4, [\words, #\ns]
    ldr x5, [x3]
    add x5, x5, x4
    str x5, [x3]
    ldr x5, [\words, #\next]
    br x5
.endm

// The address of mstatus is left in x4, its value in w5, and SUM in w6.
.macro test_sum
    ldr x4, [x3, #{site}]
    ldr w4, [x4]
    ldr w5, [x3, #{insn}]
    cmp w4, w5
    b.ne leave
    ldr x4, [x3, #{operand}]
    ldr w4, [x4]
    movz w6, #{sum_1}, lsl #16
    tst w4, w6
    b.eq leave
    ldr x4, [x3, #{mstatus}]
    ldr w5, [x4]
    tst w5, w6
.endm

// The address of the entry is in x5.
.macro drop_unless_kernel kept
    ldr x9, [x5]
    ldr x10, [x5, #8]
    and x9, x9, x10
    ldr x10, [x5, #16]
    tst x9, x10
    b.mi \kept
    str x8, [x5]
    str x8, [x5, #8]
    str x8, [x5, #16]
.endm

// The number of bytes is in x6.
.macro find_range again, address, end
    ldr x4, [x3, #{map}]
    sub x4, x4, #{range_size}
\again:
    add x4, x4, #{range_size}
    ldr x7, [x4, #{past}]
    cbz x7, leave
    ldr x10, [x4, #{first}]
    cmp \address, x10
    b.lo \again
    cmp \address, x7
    b.hs \again
    add \end, \address, x6
    cmp \end, x7
    b.hi leave
.endm

@routine x86
// void (uc x0, vector w1, words x2)
    ldr x3, [x2, #{ip}]
    ldr x4, [x3]
    add x5, x2, #{debug_traps}
    cmp w1, #{debug_vector}
    b.eq look
    cmp w1, #{breakpoint_vector}
    b.ne python
    sub x4, x4, #1
    add x5, x2, #{breakpoints}
look:
    search x2, x5, {shift}, {entries}
    cmp w1, #{debug_vector}
    b.eq stepped
    str x7, [x3]
    ret
stepped:
    cmp x7, x4
    b.eq round
    str x7, [x3]
    ldr x5, [x2, #{flags}]
    ldr w6, [x5]
    movz w7, #{trap_flag}
    bic w6, w6, w7
    str w6, [x5]
round:
    ret
python:
    ldr x5, [x2, #{stub}]
    cbz x5, callback
    cmp w1, #{breakpoint_vector}
    b.ne callback
    ldr x6, [x2, #{privilege}]
    ldr w6, [x6]
    tst w6, #3
    b.ne callback
    ldr x6, [x2, #{flags}]
    ldr w6, [x6]
    movz w7, #{delivered_flags_0}
    movk w7, #{delivered_flags_1}, lsl #16
    tst w6, w7
    b.ne callback
    ldr x6, [x2, #{idt}]
    ldr x6, [x6]
    ldr x7, [x2, #{idt_base}]
    cmp x6, x7
    b.ne callback
    ldr x6, [x2, #{gate}]
    ldr x7, [x6]
    ldr x8, [x2, #{gate_low}]
    cmp x7, x8
    b.ne callback
    ldr x7, [x6, #8]
    ldr x8, [x2, #{gate_high}]
    cmp x7, x8
    b.ne callback
    ldr x6, [x2, #{cells}]
    ldr x7, [x2, #{stack_segment}]
    ldr w7, [x7]
    str x7, [x6]
    ldr x7, [x2, #{code_segment}]
    ldr w7, [x7]
    str x7, [x6, #16]
    ldr x7, [x3]
    str x7, [x6, #24]
    str x5, [x3]
    ldr x3, [x2, #{sp}]
    ldr x7, [x3]
    str x7, [x6, #8]
    and x7, x7, #0xfffffffffffffff0
    str x7, [x3]
    count_hit x2
    ret
callback:
    ldr x16, [x2, #{callback}]
    br x16

@routine riscv
// bool (uc x0, words x1)
    ldr x9, [x1, #{error}]
    cbz x9, python
    ldr x3, [x1, #{ip}]
    ldr x4, [x3]
    search x1, x1, {breakpoints_shift}, {breakpoints}
    tst x7, #{linked}
    b.ne linked
leave:
    str x7, [x3]
    str wzr, [x9]
    movz w0, #1
    ret
linked:
    follow_link
    b leave
python:
    ldr x16, [x1, #{callback}]
    br x16

@routine arm64
// void (uc x0, exception w1, words x2)
    cmp w1, #{brk_exception}
    b.ne python
    ldr x3, [x2, #{ip}]
    ldr x4, [x3]
    search x2, x2, {breakpoints_shift}, {breakpoints}
    tst x7, #{linked}
    b.ne linked
leave:
    str x7, [x3]
    ret
linked:
    follow_link
    b leave
python:
    ldr x16, [x2, #{callback}]
    br x16

@routine arrive
// void (uc x0, vector w1, words x2)
    ldr w3, [x2, #{arrival_vector}]
    cmp w1, w3
    b.ne beyond
    ldr x5, [x2, #{ip}]
    ldr x3, [x5]
    ldr x4, [x2, #{arrival}]
    cmp x3, x4
    b.ne beyond
    ldr x4, [x2, #{arrival_ip}]
    str x4, [x5]
    ldr x3, [x2, #{arrivals}]
    add x3, x3, #1
    str x3, [x2, #{arrivals}]
    ldr x3, [x2, #{in_flight}]
    cbz x3, stop
    movn w4, #0
    str w4, [x3]
stop:
    ldr x16, [x2, #{emu_stop}]
    br x16
beyond:
    ldr x16, [x2, #{beyond}]
    br x16

@routine enter
// void (uc x0, vector w1, words x2)
    ldr w3, [x2, #{entry_vector}]
    cmp w1, w3
    b.ne refuse
    ldr x4, [x2, #{checks}]
check:
    ldr x5, [x4]
    cbz x5, enter
    ldr x5, [x5]
    ldr x6, [x4, #{check_mask}]
    and x5, x5, x6
    ldr x6, [x4, #{check_value}]
    cmp x5, x6
    b.ne refuse
    add x4, x4, #{check_size}
    b check
enter:
    ldr x4, [x2, #{moves}]
move:
    ldr x5, [x4]
    cbz x5, entered
    ldr x6, [x4, #{move_source}]
    ldr x6, [x6]
    ldr x7, [x4, #{move_mask}]
    and x6, x6, x7
    ldr x7, [x4, #{move_factor}]
    mul x6, x6, x7
    ldr x7, [x4, #{move_added}]
    add x6, x6, x7
    ldr x7, [x5]
    ldr x8, [x4, #{move_kept}]
    and x7, x7, x8
    orr x6, x6, x7
    str x6, [x5]
    add x4, x4, #{move_size}
    b move
entered:
    ret
refuse:
    ldr x16, [x2, #{refused}]
    br x16

@routine enter_insn
// void (uc x0, words x1)
    mov x2, x1
    movz w1, #0
    ldr x16, [x2, #{routine}]
    br x16

@routine rdtsc
// int (uc x0, words x1)
    ldr x2, [x1, #{followed}]
    cbnz x2, python
    movz x2, #{step_factor_0}
    movk x2, #{step_factor_1}, lsl #16
    movk x2, #{step_factor_2}, lsl #32
    movk x2, #{step_factor_3}, lsl #48
    ldr x3, [x1, #{steps}]
    mul x2, x2, x3
    movz x3, #{step_addend_0}
    movk x3, #{step_addend_1}, lsl #16
    movk x3, #{step_addend_2}, lsl #32
    movk x3, #{step_addend_3}, lsl #48
    add x2, x2, x3
    str x2, [x1, #{steps}]
    lsr x2, x2, #{step_shift}
    add x2, x2, #{shortest_step}
    ldr x3, [x1, #{tsc}]
    add x2, x2, x3
    str x2, [x1, #{tsc}]
    lsr x3, x2, #32
    mov w2, w2
    ldr x4, [x1, #{low}]
    str x2, [x4]
    ldr x4, [x1, #{high}]
    str x3, [x4]
    movz w0, #1
    ret
python:
    ldr x16, [x1, #{read_in_python}]
    br x16

@routine copy
// void (uc x0, address x1, size w2, words x3), as Unicorn's UC_HOOK_CODE before a repeated copy.
    ldr x4, [x3, #{copies_itself}]
    cbnz x4, leave
    ldr x4, [x3, #{text}]
    ldr w4, [x4]
    ldr w5, [x3, #{code_mask}]
    and w4, w4, w5
    ldr w5, [x3, #{code}]
    cmp w4, w5
    b.ne leave
    ldr x4, [x3, #{stored_flags}]
    ldr w4, [x4]
    movz w5, #{trap_flag}
    tst w4, w5
    b.ne leave
    ldr x4, [x3, #{direction}]
    ldr w4, [x4]
    cmp w4, #1
    b.ne leave
    ldr x5, [x3, #{register_mask}]
    ldr x4, [x3, #{count}]
    ldr x6, [x4]
    and x6, x6, x5
    cbz x6, leave
    movz x7, #{longest_copy_0}
    movk x7, #{longest_copy_1}, lsl #16
    cmp x6, x7
    b.hi leave
    ldr x7, [x3, #{unit}]
    mul x6, x6, x7
    ldr x4, [x3, #{source}]
    ldr x8, [x4]
    and x8, x8, x5
    ldr x4, [x3, #{destination}]
    ldr x9, [x4]
    and x9, x9, x5
    find_range source, x8, x11
    ldr x12, [x4, #{displacement}]
    add x12, x12, x8
    find_range target, x9, x13
    ldr x10, [x4, #{is_writable}]
    cbz x10, leave
    ldr x10, [x4, #{displacement}]
    add x10, x10, x9
    sub x5, x10, x12
    cmp x5, x6
    b.lo leave
    ldr x4, [x3, #{source}]
    str x11, [x4]
    ldr x4, [x3, #{destination}]
    str x13, [x4]
    ldr x4, [x3, #{count}]
    str xzr, [x4]
    ldr x4, [x3, #{copies}]
    add x4, x4, #1
    str x4, [x3, #{copies}]
    b large
pair:
    ldp x7, x8, [x12]
    add x12, x12, #16
    stp x7, x8, [x10]
    add x10, x10, #16
large:
    subs x6, x6, #16
    b.hs pair
    adds x6, x6, #16
    b.eq leave
word:
    ldr w7, [x12]
    add x12, x12, #4
    str w7, [x10]
    add x10, x10, #4
    subs x6, x6, #4
    b.ne word
leave:
    ret

@routine set_sum
// void (uc x0, address x1, size w2, words x3)
    test_sum
    b.ne leave
    orr w5, w5, w6
    str w5, [x4]
    ldr x4, [x3, #{spared}]
    add x4, x4, #1
    str x4, [x3, #{spared}]
leave:
    ret

@routine clear_sum
// void (uc x0, address x1, size w2, words x3)
    test_sum
    b.eq leave
    bic w5, w5, w6
    str w5, [x4]
    ldr x4, [x3, #{spared}]
    add x4, x4, #1
    str x4, [x3, #{spared}]
    ldr x4, [x3, #{tlb}]
    ldr x5, [x4, #8]
    ldr x6, [x4]
    add x6, x6, x5
    ldr x7, [x3, #{used}]
    movn x8, #0
entry:
    drop_unless_kernel kept
    ldr x9, [x7]
    sub x9, x9, #1
    str x9, [x7]
kept:
    add x5, x5, #{entry_size}
    cmp x5, x6
    b.ls entry
    ldr x5, [x3, #{victims}]
    add x6, x5, #{victims_size}
victim:
    drop_unless_kernel past
past:
    add x5, x5, #{entry_size}
    cmp x5, x6
    b.lo victim
leave:
    ret

@routine count
// void (uc x0, address x1, size w2, time x3)
    ldr x4, [x3]
    add x4, x4, #1
    str x4, [x3]
    ret

@routine end_quantum
// void (uc x0, address x1, size w2, words x3)
    ldr x4, [x3, #{is_bounded}]
    ldr x5, [x3, #{overdue}]
    orr x4, x4, x5
    cbnz x4, python
    ldr x4, [x3, #{end}]
    cmp x1, x4
    b.eq python
    ldr x4, [x3, #{left}]
    cbz x4, leave
    subs x4, x4, #1
    b.eq python
    str x4, [x3, #{left}]
leave:
    ret
python:
    ldr x4, [x3, #{count_in_python}]
    br x4

@routine charge_intr
// A trap takes time; then the routine for traps, as Unicorn's UC_HOOK_INTR.
    charge x2, {trap_ns}, {routine}

@routine charge_invalid
// A trap takes time; then the routine for traps, as Unicorn's UC_HOOK_INSN_INVALID.
    charge x1, {trap_ns}, {routine}

@routine handler_intr
// The Python callback takes more time.
    charge x2, {handler_ns}, {handler}

@routine handler_invalid
// The Python callback takes more time.
    charge x1, {handler_ns}, {handler}
