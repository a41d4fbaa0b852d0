"""Modules written for Linux, with <linux/NAME.h> and macros without a semicolon, compile and run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from emulated_kernel.image.build_images import main, write_module
from emulated_kernel.kernel.api import Kernel

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


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_module_for_another_architecture_replaces_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in Linux's build, the file has the same name for each architecture. The output says what it was."""
    directory = tmp_path / "recurses"
    directory.mkdir()
    (directory / "recurses.c").write_text(RECURSES)
    replaced = []
    for arch in ("x86_64", "x86_64", "i386", "x86_64"):
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
