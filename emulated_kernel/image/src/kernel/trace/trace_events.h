/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What only the print formats of the events refer to. */
#ifndef _TRACE_EVENTS_H
#define _TRACE_EVENTS_H

/* CONFIG_MEMCG_KMEM; nobody asks for __GFP_ACCOUNT here. */
#define IS_ENABLED(option) 1

#define __def_gfpflag_names                                                                    \
	gfpflag_string(GFP_TRANSHUGE), gfpflag_string(GFP_TRANSHUGE_LIGHT),                    \
	gfpflag_string(GFP_HIGHUSER_MOVABLE), gfpflag_string(GFP_HIGHUSER),                    \
	gfpflag_string(GFP_USER), gfpflag_string(GFP_KERNEL_ACCOUNT),                          \
	gfpflag_string(GFP_KERNEL), gfpflag_string(GFP_NOFS), gfpflag_string(GFP_ATOMIC),      \
	gfpflag_string(GFP_NOIO), gfpflag_string(GFP_NOWAIT), gfpflag_string(GFP_DMA),         \
	gfpflag_string(__GFP_HIGHMEM), gfpflag_string(GFP_DMA32), gfpflag_string(__GFP_HIGH),  \
	gfpflag_string(__GFP_ATOMIC), gfpflag_string(__GFP_IO), gfpflag_string(__GFP_FS),      \
	gfpflag_string(__GFP_NOWARN), gfpflag_string(__GFP_RETRY_MAYFAIL),                     \
	gfpflag_string(__GFP_NOFAIL), gfpflag_string(__GFP_NORETRY),                           \
	gfpflag_string(__GFP_COMP), gfpflag_string(__GFP_ZERO),                                \
	gfpflag_string(__GFP_NOMEMALLOC), gfpflag_string(__GFP_MEMALLOC),                      \
	gfpflag_string(__GFP_HARDWALL), gfpflag_string(__GFP_THISNODE),                        \
	gfpflag_string(__GFP_RECLAIMABLE), gfpflag_string(__GFP_MOVABLE),                      \
	gfpflag_string(__GFP_ACCOUNT), gfpflag_string(__GFP_WRITE),                            \
	gfpflag_string(__GFP_RECLAIM), gfpflag_string(__GFP_DIRECT_RECLAIM),                   \
	gfpflag_string(__GFP_KSWAPD_RECLAIM), gfpflag_string(__GFP_ZEROTAGS)
#define gfpflag_string(flag) {(__force unsigned long)flag, #flag}
#define __def_gfpflag_names_kasan
#define show_gfp_flags(flags) \
	(flags) ? __print_flags(flags, "|", __def_gfpflag_names __def_gfpflag_names_kasan \
	) : "none"

#define decode_timer_flags(flags)                                                              \
	__print_flags(flags, "|", { TIMER_MIGRATING, "M" }, { TIMER_DEFERRABLE, "D" },         \
		      { TIMER_PINNED, "P" }, { TIMER_IRQSAFE, "I" })

#define decode_hrtimer_mode(mode)                                                              \
	__print_symbolic(mode, { HRTIMER_MODE_ABS, "ABS" }, { HRTIMER_MODE_REL, "REL" },       \
			 { HRTIMER_MODE_ABS_PINNED, "ABS|PINNED" },                            \
			 { HRTIMER_MODE_REL_PINNED, "REL|PINNED" },                            \
			 { HRTIMER_MODE_ABS_SOFT, "ABS|SOFT" },                                \
			 { HRTIMER_MODE_REL_SOFT, "REL|SOFT" },                                \
			 { HRTIMER_MODE_ABS_PINNED_SOFT, "ABS|PINNED|SOFT" },                  \
			 { HRTIMER_MODE_REL_PINNED_SOFT, "REL|PINNED|SOFT" },                  \
			 { HRTIMER_MODE_ABS_HARD, "ABS|HARD" },                                \
			 { HRTIMER_MODE_REL_HARD, "REL|HARD" },                                \
			 { HRTIMER_MODE_ABS_PINNED_HARD, "ABS|PINNED|HARD" },                  \
			 { HRTIMER_MODE_REL_PINNED_HARD, "REL|PINNED|HARD" })

#define drop_reason_string(number, name) { number, #name }

#define show_family_name(family) __print_symbolic(family, { 2, "AF_INET" }, { 10, "AF_INET6" })
#define show_inet_protocol_name(protocol)                                                      \
	__print_symbolic(protocol, { 6, "IPPROTO_TCP" }, { 33, "IPPROTO_DCCP" },               \
			 { 132, "IPPROTO_SCTP" }, { 262, "IPPROTO_MPTCP" })
#define socket_states(S)                                                                       \
	S(1, TCP_ESTABLISHED), S(2, TCP_SYN_SENT), S(3, TCP_SYN_RECV), S(4, TCP_FIN_WAIT1),    \
	S(5, TCP_FIN_WAIT2), S(6, TCP_TIME_WAIT), S(7, TCP_CLOSE), S(8, TCP_CLOSE_WAIT),       \
	S(9, TCP_LAST_ACK), S(10, TCP_LISTEN), S(11, TCP_CLOSING), S(12, TCP_NEW_SYN_RECV)
#define by_number(number, name) { number, #name }
#define by_name(number, name) { name, #name }
#define show_socket_state_number(state) __print_symbolic(state, socket_states(by_number))
#define show_tcp_state_name(state) __print_symbolic(state, socket_states(by_name))

#endif
