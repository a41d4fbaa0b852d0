"""Profiles of versions of Linux whose interface is not complete yet."""

from __future__ import annotations

from emulated_kernel.kprobes.profile import Profile

LINUX_6_12 = Profile("linux-6.12", interface="linux-6.12", probe_rules="linux-6.12", return_hook="objpool")
LINUX_7_2 = Profile("linux-7.2", interface="linux-7.2", probe_rules="linux-6.12", return_hook="objpool")
