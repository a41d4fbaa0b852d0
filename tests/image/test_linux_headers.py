"""Modules written for Linux, with <linux/NAME.h> and macros without a semicolon, compile and run."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest

from emulated_kernel.image.build_images import TARGETS, main, write_module
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig

INIT_PID = 1
KTHREADD_PID = 2
SOURCE = r"""
#define pr_fmt(fmt) "%s: " fmt, __func__

#include <linux/kernel.h>
#include <linux/module.h>
#include <linux/kprobes.h>
#include <linux/ktime.h>
#include <linux/list.h>

static char where[KSYM_NAME_LEN] = "gcd";
module_param_string(where, where, KSYM_NAME_LEN, 0644);
MODULE_PARM_DESC(where, "the probed function");

static ktime_t began;
static struct kprobe kp = {
	.symbol_name = where,
};

static int __kprobes seen(struct kprobe *p, struct pt_regs *regs)
{
#ifdef CONFIG_X86
	pr_info("<%s> at 0x%p, ip = %lx\n", p->symbol_name, p->addr, regs->ip);
#endif
#ifdef CONFIG_RISCV
	pr_info("<%s> at 0x%p, pc = 0x%lx\n", p->symbol_name, p->addr, regs->epc);
#endif
	pr_info("argument %lu\n", regs_get_kernel_argument(regs, 1));
	return 0;
}

static void __kprobes after(struct kprobe *p, struct pt_regs *regs, unsigned long flags)
{
	pr_info("later by %d\n", ktime_to_ns(ktime_sub(ktime_get(), began)) > 0);
}
NOKPROBE_SYMBOL(after);

static int __init probed_init(void)
{
	int ret;

	began = ktime_get();
	kp.pre_handler = seen;
	kp.post_handler = after;
	ret = register_kprobe(&kp);
	if (ret < 0) {
		pr_err("register_kprobe returned %d\n", ret);
		return ret;
	}
	return 0;
}

static void __exit probed_exit(void)
{
	unregister_kprobe(&kp);
}

module_init(probed_init)
module_exit(probed_exit)
MODULE_AUTHOR("a test");
MODULE_LICENSE("GPL");
"""


RETURNS = r"""
#include <linux/kernel.h>
#include <linux/module.h>
#include <linux/kprobes.h>
#include <linux/ktime.h>
#include <linux/sched.h>

struct call {
	ktime_t began;
	unsigned long first;
};

static int kernel_threads, tasks;

static int entered(struct kretprobe_instance *ri, struct pt_regs *regs)
{
	struct call *call = (struct call *)ri->data;

	if (!current->mm)
		kernel_threads++;
	else
		tasks++;
	call->began = ktime_get();
	call->first = regs->di;
	return call->first == 7;
}
NOKPROBE_SYMBOL(entered);

static int left(struct kretprobe_instance *ri, struct pt_regs *regs)
{
	struct call *call = (struct call *)ri->data;
	long long took = ktime_to_ns(ktime_sub(ktime_get(), call->began));

	pr_info("%ps(%lu) = %lu, later by %d, in %s\n", (void *)get_kretprobe(ri)->kp.addr, call->first,
		regs_return_value(regs), took > 0, current->comm);
	return 0;
}
NOKPROBE_SYMBOL(left);

static struct kretprobe returns = {
	.handler = left,
	.entry_handler = entered,
	.data_size = sizeof(struct call),
	.maxactive = 1,
};

static int __init returns_init(void)
{
	returns.kp.symbol_name = "gcd";
	return register_kretprobe(&returns);
}

static void __exit returns_exit(void)
{
	unregister_kretprobe(&returns);
	pr_info("missed %d, seen %d and %d\n", returns.nmissed, kernel_threads, tasks);
}

module_init(returns_init)
module_exit(returns_exit)
MODULE_LICENSE("GPL");
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_module_with_a_return_probe(tmp_path: Path) -> None:
    """A return probe of a module has data for each call, and leaves out a call if its entry handler returns
    1.

    The handlers distinguish tasks that have an mm from kernel threads.
    """
    directory = tmp_path / "returns"
    directory.mkdir()
    (directory / "returns.c").write_text(RETURNS)
    assert write_module("x86_64", directory) == 0
    with Kernel() as kernel:
        kernel.write_file("machine/modules", f"load {directory}/returns.ko")
        kernel.call("gcd", 12, 18)
        kernel.call("gcd", 7, 14)
        kernel.write_file("machine/modules", "unload returns")
        log = kernel.read_file("machine/dmesg")
        with kernel.lock:
            tasks = map(kernel.guest.kernel.find_task, (INIT_PID, KTHREADD_PID))
            offset = kernel.machine.image.abi["task_struct.mm"]
            mms = [kernel.machine.memory.read_word(task + offset) for task in tasks]
    assert list(map(bool, mms)) == [True, False]
    assert log.count("gcd(") == 1
    assert "gcd(12) = 6, later by 1, in " in log
    assert "missed 0, seen 0 and 2\n" in log


REGISTERS = r"""
#include <linux/module.h>
#include <linux/kprobes.h>
#include <linux/ptrace.h>

#ifdef CONFIG_RISCV
#define RESULT "a0"
#define POINTER "epc"
#else
#define RESULT "ax"
#define POINTER "ip"
#endif

noinline long nine(long a, long b, long c, long d, long e, long f, long g, long h, long i)
{
	barrier();
	return a + b + c + d + e + f + g + h + i;
}

noinline long other(long a, long b, long c, long d, long e, long f, long g, long h, long i)
{
	barrier();
	return a * b * c * d * e * f * g * h * i;
}

noinline long call_nine(void)
{
	long sum = nine(1, 2, 3, 4, 5, 6, 7, 8, 9);

	barrier();
	return sum;
}

static int at_nine(struct kprobe *p, struct pt_regs *regs)
{
	unsigned int word = 0;
	int n;

	for (n = 0; n < 9; n++)
		pr_info("registers: argument %d = %lu\n", n, regs_get_kernel_argument(regs, n));
	while (regs_get_kernel_stack_nth_addr(regs, word))
		word++;
	pr_info("registers: words %d, behind %lu, inside %d, outside %d\n", word > 0,
		regs_get_kernel_stack_nth(regs, word), regs_within_kernel_stack(regs, kernel_stack_pointer(regs)),
		regs_within_kernel_stack(regs, kernel_stack_pointer(regs) + THREAD_SIZE));
	pr_info("registers: user %d, pc %d, sp %d\n", !!user_mode(regs),
		profile_pc(regs) == instruction_pointer(regs),
		user_stack_pointer(regs) == kernel_stack_pointer(regs));
	pr_info("registers: pointer %d, name %s, none %d\n",
		regs_get_register(regs, regs_query_register_offset(POINTER)) == instruction_pointer(regs),
		regs_query_register_name(regs_query_register_offset(RESULT)), regs_query_register_offset("nosuch"));
	pr_info("registers: behind %lu, name behind %d\n", regs_get_register(regs, MAX_REG_OFFSET + sizeof(long)),
		regs_query_register_name(MAX_REG_OFFSET + sizeof(long)) == NULL);
	instruction_pointer_set(regs, (unsigned long)other);
	return 1;
}

static int returned(struct kretprobe_instance *ri, struct pt_regs *regs)
{
	pr_info("registers: returned %lu\n", regs_return_value(regs));
	regs_set_return_value(regs, regs_return_value(regs) + 1);
	return 0;
}

static struct kprobe entry = { .pre_handler = at_nine };
static struct kretprobe caller = { .handler = returned };

static int __init registers_init(void)
{
	entry.symbol_name = "nine";
	caller.kp.symbol_name = "call_nine";
	return register_kprobe(&entry) ?: register_kretprobe(&caller);
}

static void __exit registers_exit(void)
{
	unregister_kprobe(&entry);
	unregister_kretprobe(&caller);
}

module_init(registers_init)
module_exit(registers_exit)
MODULE_LICENSE("GPL");
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_handler_uses_the_registers_by_their_functions(arch: str, tmp_path: Path) -> None:
    """The functions of <linux/ptrace.h> give the same answers on each architecture, as in Linux.

    The entry's handler makes the call go to another function, and the return's handler changes the result.
    """
    if shutil.which(TARGETS[arch].compiler) is None:
        pytest.skip(f"{TARGETS[arch].compiler} is not installed; scripts/test installs it as root")
    directory = tmp_path / "registers"
    directory.mkdir()
    (directory / "registers.c").write_text(REGISTERS)
    assert write_module(arch, directory) == 0
    with Kernel(MachineConfig(arch=arch)) as kernel:
        kernel.write_file("machine/modules", f"load {directory}/registers.ko")
        product = math.factorial(9)
        assert kernel.call("call_nine") == product + 1
        log = kernel.read_file("machine/dmesg")
    # Linux reads no arguments from the stack on RISC-V.
    arguments = [*range(1, 9), 0 if arch.startswith("riscv") else 9]
    expected = [f"argument {number} = {value}" for number, value in enumerate(arguments)]
    result = "a0" if arch.startswith("riscv") else "ax"
    expected += [
        "words 1, behind 0, inside 1, outside 0",
        "user 0, pc 1, sp 1",
        f"pointer 1, name {result}, none -22",
        "behind 0, name behind 1",
        f"returned {product}",
    ]
    assert re.findall("registers: (.*)", log) == expected


RECURSES = r"""
#include <linux/module.h>
#include <linux/kprobes.h>

static int returned(struct kretprobe_instance *ri, struct pt_regs *regs)
{
	return 0;
}

static struct kretprobe probe = {
	.kp.symbol_name = "recurse",
	.handler = returned,
	.maxactive = 2,
};

noinline int recurse(int depth)
{
	int below = depth ? recurse(depth - 1) : 0;

	barrier();
	return below + depth;
}

noinline int missed(void)
{
	return probe.nmissed;
}

static int __init recurses_init(void)
{
	return register_kretprobe(&probe);
}

static void __exit recurses_exit(void)
{
	unregister_kretprobe(&probe);
	pr_info("recurses: missed %d\n", probe.nmissed);
}

module_init(recurses_init)
module_exit(recurses_exit)
MODULE_LICENSE("GPL");
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_module_reads_the_missed_calls_of_its_return_probe(tmp_path: Path) -> None:
    """`nmissed` of a registered struct kretprobe is current, as in Linux."""
    directory = tmp_path / "recurses"
    directory.mkdir()
    (directory / "recurses.c").write_text(RECURSES)
    assert write_module("x86_64", directory) == 0
    with Kernel() as kernel:
        kernel.write_file("machine/modules", f"load {directory}/recurses.ko")
        for number in range(4):
            assert kernel.call("missed") == 4 * number
            assert kernel.call("recurse", 5) == 15
        kernel.write_file("machine/modules", "unload recurses")
        assert "recurses: missed 16\n" in kernel.read_file("machine/dmesg")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_several_modules_are_built_by_one_command(tmp_path: Path) -> None:
    options = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.c").write_text(RECURSES)
        options += ["--module", str(tmp_path / name)]
    assert main(["--arch", "x86_64", *options]) == 0
    assert sorted(file.name for file in tmp_path.glob("*/*.ko")) == ["first.ko", "second.ko"]


@pytest.mark.parametrize(("one", "other"), [("x86_64", "i386"), ("riscv64", "riscv64i")])
def test_a_module_for_another_architecture_replaces_the_file(
    one: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has the same name for each architecture, as in Linux's build.

    The output says that the replaced file was for another architecture.
    """
    if shutil.which(TARGETS[one].compiler) is None:
        pytest.skip(f"{TARGETS[one].compiler} is not installed; scripts/test installs it as root")
    directory = tmp_path / "recurses"
    directory.mkdir()
    (directory / "recurses.c").write_text(RECURSES)
    replaced = []
    for arch in (one, one, other, one):
        assert write_module(arch, directory) == 0
        told = capsys.readouterr().out
        assert f" bytes for {arch}" in told
        replaced.append("in place of" in told)
    assert replaced == [False, False, True, True]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_module_for_linux(tmp_path: Path) -> None:
    directory = tmp_path / "probed"
    directory.mkdir()
    (directory / "probed.c").write_text(SOURCE)
    assert write_module("x86_64", directory) == 0
    with Kernel() as kernel:
        kernel.write_file("machine/modules", f"load {directory}/probed.ko")
        assert kernel.call("gcd", 12, 18) == 6
        log = kernel.read_file("machine/dmesg")
        address = kernel.kallsyms_lookup_name("gcd")
    assert f"seen: <gcd> at 0x{address:016x}, ip = {address + 1:x}" in log
    assert "seen: argument 18\n" in log
    assert "after: later by 1" in log
