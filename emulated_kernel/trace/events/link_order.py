"""The order in which Linux 6.1 links its static events, which is the order of events in tracefs's files."""

from __future__ import annotations

from collections.abc import Iterator

_LINKED = """
    syscalls: arch_prctl rt_sigreturn irq_vectors: vector_free_moved vector_setup vector_teardown
    vector_deactivate vector_activate vector_alloc_managed vector_alloc vector_reserve
    vector_reserve_managed vector_clear vector_update vector_config thermal_apic_exit thermal_apic_entry
    call_function_single_exit call_function_single_entry call_function_exit call_function_entry
    reschedule_exit reschedule_entry irq_work_exit irq_work_entry x86_platform_ipi_exit
    x86_platform_ipi_entry error_apic_exit error_apic_entry spurious_apic_exit spurious_apic_entry
    local_timer_exit local_timer_entry syscalls: iopl ioperm nmi: nmi_handler syscalls: modify_ldt mmap
    exceptions: page_fault_kernel page_fault_user syscalls: unshare clone3 clone vfork fork
    set_tid_address task: task_rename task_newtask syscalls: personality cpuhp: cpuhp_exit
    cpuhp_multi_enter cpuhp_enter syscalls: wait4 waitid exit_group exit irq: tasklet_exit tasklet_entry
    softirq_raise softirq_exit softirq_entry irq_handler_exit irq_handler_entry syscalls: capset capget
    ptrace rt_sigsuspend pause rt_sigaction sigaltstack rt_tgsigqueueinfo rt_sigqueueinfo tkill tgkill
    pidfd_send_signal kill rt_sigtimedwait rt_sigpending rt_sigprocmask restart_syscall signal:
    signal_deliver signal_generate syscalls: sysinfo getcpu prctl umask getrusage setrlimit prlimit64
    getrlimit setdomainname sethostname newuname setsid getsid getpgrp getpgid setpgid times getegid
    getgid geteuid getuid getppid gettid getpid setfsgid setfsuid getresgid setresgid getresuid setresuid
    setuid setreuid setgid setregid getpriority setpriority workqueue: workqueue_execute_end
    workqueue_execute_start workqueue_activate_work workqueue_queue_work syscalls: pidfd_getfd pidfd_open
    setns reboot setgroups getgroups sched_rr_get_interval sched_get_priority_min sched_get_priority_max
    sched_yield sched_getaffinity sched_setaffinity sched_getattr sched_getparam sched_getscheduler
    sched_setattr sched_setparam sched_setscheduler sched: sched_wake_idle_without_ipi sched_swap_numa
    sched_stick_numa sched_move_numa sched_process_hang sched_pi_setprio sched_stat_runtime
    sched_stat_blocked sched_stat_iowait sched_stat_sleep sched_stat_wait sched_process_exec
    sched_process_fork sched_process_wait sched_wait_task sched_process_exit sched_process_free
    sched_migrate_task sched_switch sched_wakeup_new sched_wakeup sched_waking
    sched_kthread_work_execute_end sched_kthread_work_execute_start sched_kthread_work_queue_work
    sched_kthread_stop_ret sched_kthread_stop syscalls: membarrier syslog printk: console raw_syscalls:
    sys_exit sys_enter syscalls: finit_module init_module delete_module module: module_request module_put
    module_get module_free module_load syscalls: kcmp adjtimex settimeofday gettimeofday time timer:
    tick_stop itimer_expire itimer_state hrtimer_cancel hrtimer_expire_exit hrtimer_expire_entry
    hrtimer_start hrtimer_init timer_cancel timer_expire_exit timer_expire_entry timer_start timer_init
    syscalls: nanosleep clock_nanosleep clock_getres clock_adjtime clock_gettime clock_settime
    timer_delete timer_settime timer_getoverrun timer_gettime timer_create setitimer alarm getitimer
    futex_waitv futex get_robust_list set_robust_list acct kexec_load kexec_file_load seccomp power:
    guest_halt_poll_ns dev_pm_qos_remove_request dev_pm_qos_update_request dev_pm_qos_add_request
    pm_qos_update_flags pm_qos_update_target pm_qos_remove_request pm_qos_update_request
    pm_qos_add_request power_domain_target clock_set_rate clock_disable clock_enable
    wakeup_source_deactivate wakeup_source_activate suspend_resume device_pm_callback_end
    device_pm_callback_start cpu_frequency_limits cpu_frequency pstate_sample powernv_throttle
    cpu_idle_miss cpu_idle syscalls: bpf perf_event_open context_tracking: user_exit user_enter syscalls:
    rseq filemap: file_check_and_advance_wb_err filemap_set_wb_err mm_filemap_add_to_page_cache
    mm_filemap_delete_from_page_cache syscalls: process_mrelease oom: compact_retry skip_task_reaping
    finish_task_reaping start_task_reaping wake_reaper mark_victim reclaim_retry_zone oom_score_adj_update
    syscalls: fadvise64 readahead pagemap: mm_lru_activate mm_lru_insertion vmscan: mm_vmscan_throttled
    mm_vmscan_node_reclaim_end mm_vmscan_node_reclaim_begin mm_vmscan_lru_shrink_active
    mm_vmscan_lru_shrink_inactive mm_vmscan_write_folio mm_vmscan_lru_isolate mm_shrink_slab_end
    mm_shrink_slab_start mm_vmscan_memcg_softlimit_reclaim_end mm_vmscan_memcg_reclaim_end
    mm_vmscan_direct_reclaim_end mm_vmscan_memcg_softlimit_reclaim_begin mm_vmscan_memcg_reclaim_begin
    mm_vmscan_direct_reclaim_begin mm_vmscan_wakeup_kswapd mm_vmscan_kswapd_wake mm_vmscan_kswapd_sleep
    percpu: percpu_destroy_chunk percpu_create_chunk percpu_alloc_percpu_fail percpu_free_percpu
    percpu_alloc_percpu kmem: rss_stat mm_page_alloc_extfrag mm_page_pcpu_drain mm_page_alloc_zone_locked
    mm_page_alloc mm_page_free_batched mm_page_free kmem_cache_free kfree kmalloc kmem_cache_alloc
    syscalls: mincore munlockall mlockall munlock mlock2 mlock remap_file_pages munmap brk mmap: exit_mmap
    vma_store vma_mas_szero vm_unmapped_area syscalls: pkey_free pkey_alloc pkey_mprotect mprotect mremap
    msync process_vm_writev process_vm_readv process_madvise madvise swapon swapoff get_mempolicy
    migrate_pages set_mempolicy mbind set_mempolicy_home_node move_pages memfd_secret memfd_create vhangup
    close_range close creat openat2 openat open fchown lchown chown fchownat chmod fchmodat fchmod chroot
    fchdir chdir access faccessat2 faccessat fallocate ftruncate truncate copy_file_range sendfile64
    pwritev2 pwritev preadv2 preadv writev readv pwrite64 pread64 write read lseek statx readlink
    readlinkat newfstat newfstatat newlstat newstat execveat execve pipe pipe2 rename renameat renameat2
    link linkat symlink symlinkat unlink unlinkat rmdir mkdir mkdirat mknod mknodat fcntl ioctl getdents64
    getdents ppoll poll pselect6 select dup dup2 dup3 sysfs mount_setattr pivot_root move_mount fsmount
    mount open_tree umount fremovexattr lremovexattr removexattr flistxattr llistxattr listxattr fgetxattr
    lgetxattr getxattr fsetxattr lsetxattr setxattr writeback: sb_clear_inode_writeback
    sb_mark_inode_writeback writeback_dirty_inode_enqueue writeback_lazytime_iput writeback_lazytime
    writeback_single_inode writeback_single_inode_start writeback_sb_inodes_requeue balance_dirty_pages
    bdi_dirty_ratelimit global_dirty_state writeback_queue_io wbc_writepage writeback_bdi_register
    writeback_wake_background writeback_pages_written writeback_wait writeback_written writeback_start
    writeback_exec writeback_queue writeback_write_inode writeback_write_inode_start flush_foreign
    track_foreign_dirty inode_switch_wbs inode_foreign_history writeback_dirty_inode
    writeback_dirty_inode_start writeback_mark_inode_dirty folio_wait_writeback writeback_dirty_folio
    syscalls: tee splice vmsplice sync_file_range fdatasync fsync syncfs sync utime utimes futimesat
    utimensat getcwd ustat fstatfs statfs fsconfig fspick fsopen inotify_rm_watch inotify_add_watch
    inotify_init inotify_init1 fanotify_mark fanotify_init epoll_pwait2 epoll_pwait epoll_wait epoll_ctl
    epoll_create epoll_create1 signalfd signalfd4 timerfd_gettime timerfd_settime timerfd_create eventfd
    eventfd2 userfaultfd io_pgetevents io_getevents io_cancel io_submit io_destroy io_setup flock
    open_by_handle_at name_to_handle_at quotactl_fd quotactl msgrcv msgsnd msgctl msgget semop semtimedop
    semctl semget shmdt shmat shmctl shmget mq_getsetattr mq_notify mq_timedreceive mq_timedsend mq_unlink
    mq_open keyctl request_key add_key landlock_restrict_self landlock_add_rule landlock_create_ruleset
    ioprio_get ioprio_set io_uring_register io_uring_setup io_uring_enter getrandom recvmmsg recvmsg
    sendmmsg sendmsg shutdown getsockopt setsockopt recvfrom sendto getpeername getsockname connect accept
    accept4 listen bind socketpair socket neigh: neigh_cleanup_and_release neigh_event_send_dead
    neigh_event_send_done neigh_timer_handler neigh_update_done neigh_update neigh_create qdisc:
    qdisc_create qdisc_destroy qdisc_reset qdisc_enqueue qdisc_dequeue tcp: tcp_cong_state_set
    tcp_bad_csum tcp_probe tcp_retransmit_synack tcp_rcv_space_adjust tcp_destroy_sock tcp_receive_reset
    tcp_send_reset tcp_retransmit_skb udp: udp_fail_queue_rcv_skb sock: inet_sk_error_report
    inet_sock_set_state sock_exceed_buf_limit sock_rcvqueue_full napi: napi_poll net:
    netif_receive_skb_list_exit netif_rx_exit netif_receive_skb_exit napi_gro_receive_exit
    napi_gro_frags_exit netif_rx_entry netif_receive_skb_list_entry netif_receive_skb_entry
    napi_gro_receive_entry napi_gro_frags_entry netif_rx netif_receive_skb net_dev_queue
    net_dev_xmit_timeout net_dev_xmit net_dev_start_xmit skb: skb_copy_datagram_iovec consume_skb
    kfree_skb
"""
"""Event names in link order. A word with a colon is the group of the names after it.

In the group syscalls, the names are those of system calls; a call's exit event precedes its entry event.
Mirrors: available_events of a distribution's 6.1, for the groups that a kernel without drivers can have.
"""


def linux_events() -> Iterator[tuple[str, str]]:
    """Yield group and name of each static event of Linux 6.1, in link order."""
    group = ""
    for word in _LINKED.split():
        if word.endswith(":"):
            group = word[:-1]
        elif group == "syscalls":
            yield group, f"sys_exit_{word}"
            yield group, f"sys_enter_{word}"
        else:
            yield group, word


_RANKS = {event: rank for rank, event in enumerate(linux_events())}


def link_rank(group: str, name: str) -> int:
    """Return the position of a static event in link order.

    For an event that is not in the list, return the position after the last one.
    """
    return _RANKS.get((group, name), len(_RANKS))
