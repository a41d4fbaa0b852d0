/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of the memory allocators; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM kmem

TRACE_EVENT(kmem_cache_alloc,
	PROTO(unsigned long call_site, const void *ptr, struct kmem_cache *s, gfp_t gfp_flags, int node),
	ARGS(call_site, ptr, s, gfp_flags, node),
	FIELDS(
		__field(unsigned long, call_site)
		__field(const void *, ptr)
		__field(size_t, bytes_req)
		__field(size_t, bytes_alloc)
		__field(unsigned long, gfp_flags)
		__field(int, node)
		__field(bool, accounted)),
	ASSIGN(
		__entry->call_site = call_site;
		__entry->ptr = ptr;
		__entry->bytes_req = s->object_size;
		__entry->bytes_alloc = s->size;
		__entry->gfp_flags = gfp_flags;
		__entry->node = node;
		__entry->accounted = false;),
	PRINT("call_site=%pS ptr=%p bytes_req=%zu bytes_alloc=%zu gfp_flags=%s node=%d accounted=%s",
	      (void *)__entry->call_site, __entry->ptr, __entry->bytes_req, __entry->bytes_alloc,
	      show_gfp_flags(__entry->gfp_flags), __entry->node,
	      __entry->accounted ? "true" : "false"))

TRACE_EVENT(kmalloc,
	PROTO(unsigned long call_site, const void *ptr, size_t bytes_req, size_t bytes_alloc,
	      gfp_t gfp_flags, int node),
	ARGS(call_site, ptr, bytes_req, bytes_alloc, gfp_flags, node),
	FIELDS(
		__field(unsigned long, call_site)
		__field(const void *, ptr)
		__field(size_t, bytes_req)
		__field(size_t, bytes_alloc)
		__field(unsigned long, gfp_flags)
		__field(int, node)),
	ASSIGN(
		__entry->call_site = call_site;
		__entry->ptr = ptr;
		__entry->bytes_req = bytes_req;
		__entry->bytes_alloc = bytes_alloc;
		__entry->gfp_flags = gfp_flags;
		__entry->node = node;),
	PRINT("call_site=%pS ptr=%p bytes_req=%zu bytes_alloc=%zu gfp_flags=%s node=%d accounted=%s",
	      (void *)__entry->call_site, __entry->ptr, __entry->bytes_req, __entry->bytes_alloc,
	      show_gfp_flags(__entry->gfp_flags), __entry->node,
	      (IS_ENABLED(CONFIG_MEMCG_KMEM) &&
	       (__entry->gfp_flags & (__force unsigned long)__GFP_ACCOUNT)) ? "true" : "false"))

TRACE_EVENT(kfree,
	PROTO(unsigned long call_site, const void *ptr),
	ARGS(call_site, ptr),
	FIELDS(
		__field(unsigned long, call_site)
		__field(const void *, ptr)),
	ASSIGN(
		__entry->call_site = call_site;
		__entry->ptr = ptr;),
	PRINT("call_site=%pS ptr=%p", (void *)__entry->call_site, __entry->ptr))

TRACE_EVENT(kmem_cache_free,
	PROTO(unsigned long call_site, const void *ptr, const struct kmem_cache *s),
	ARGS(call_site, ptr, s),
	FIELDS(
		__field(unsigned long, call_site)
		__field(const void *, ptr)
		__string(name)),
	ASSIGN(
		__entry->call_site = call_site;
		__entry->ptr = ptr;
		__assign_str(name, s->name);),
	PRINT("call_site=%pS ptr=%p name=%s", (void *)__entry->call_site, __entry->ptr,
	      __get_str(name)))

TRACE_EVENT(mm_page_free,
	PROTO(struct page *page, unsigned int order),
	ARGS(page, order),
	FIELDS(
		__field(unsigned long, pfn)
		__field(unsigned int, order)),
	ASSIGN(
		__entry->pfn = page_to_pfn(page);
		__entry->order = order;),
	PRINT("page=%p pfn=0x%lx order=%d", pfn_to_page(__entry->pfn), __entry->pfn, __entry->order))

TRACE_EVENT(mm_page_alloc,
	PROTO(struct page *page, unsigned int order, gfp_t gfp_flags, int migratetype),
	ARGS(page, order, gfp_flags, migratetype),
	FIELDS(
		__field(unsigned long, pfn)
		__field(unsigned int, order)
		__field(unsigned long, gfp_flags)
		__field(int, migratetype)),
	ASSIGN(
		__entry->pfn = page ? page_to_pfn(page) : -1UL;
		__entry->order = order;
		__entry->gfp_flags = gfp_flags;
		__entry->migratetype = migratetype;),
	PRINT("page=%p pfn=0x%lx order=%d migratetype=%d gfp_flags=%s",
	      __entry->pfn != -1UL ? pfn_to_page(__entry->pfn) : NULL,
	      __entry->pfn != -1UL ? __entry->pfn : 0, __entry->order, __entry->migratetype,
	      show_gfp_flags(__entry->gfp_flags)))
