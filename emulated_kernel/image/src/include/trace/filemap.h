/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of the page cache; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM filemap

EVENT_CLASS(mm_filemap_op_page_cache,
	PROTO(struct page *page, struct inode *host),
	ARGS(page, host),
	FIELDS(
		__field(unsigned long, pfn)
		__field(unsigned long, i_ino)
		__field(unsigned long, index)
		__field(dev_t, s_dev)
		__field(unsigned char, order)),
	ASSIGN(
		__entry->pfn = page_to_pfn(page);
		__entry->i_ino = (unsigned long)host->i_ino;
		__entry->index = page->index;
		__entry->s_dev = host->i_sb->s_dev;
		__entry->order = 0;),
	PRINT("dev %d:%d ino %lx pfn=0x%lx ofs=%lu order=%u",
	      ((unsigned int) ((__entry->s_dev) >> 20)),
	      ((unsigned int) ((__entry->s_dev) & ((1U << 20) - 1))), __entry->i_ino, __entry->pfn,
	      __entry->index << 12, __entry->order))

DEFINE_EVENT(mm_filemap_op_page_cache, mm_filemap_delete_from_page_cache,
	     PROTO(struct page *page, struct inode *host), ARGS(page, host))
DEFINE_EVENT(mm_filemap_op_page_cache, mm_filemap_add_to_page_cache,
	     PROTO(struct page *page, struct inode *host), ARGS(page, host))
