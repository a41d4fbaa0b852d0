// SPDX-License-Identifier: GPL-2.0-or-later
// The page allocator: a buddy system over all memory behind the image.
#include "atomic.h"
#include "bug.h"
#include "host_abi.h"
#include "mm.h"
#include "printk.h"
#include "sched.h"
#include "string.h"
#include "tracepoint.h"

unsigned long vmemmap_base;
unsigned long min_pfn, max_pfn;
struct zone contig_zone;
unsigned long totalreserve_pages;

static __always_inline void set_buddy_order(struct page *page, unsigned int order)
{
	page->order = order;
	page->flags |= PG_buddy;
}

static __always_inline void del_page_from_free_list(struct page *page)
{
	list_del(&page->lru);
	page->flags &= ~PG_buddy;
}

static __always_inline void add_to_free_list(struct page *page, struct zone *zone,
					     unsigned int order)
{
	set_buddy_order(page, order);
	list_add(&page->lru, &zone->free_area[order]);
}

/* Gives the upper halves of a too large block back. */
static __always_inline void expand(struct zone *zone, struct page *page, unsigned int low,
				   unsigned int high)
{
	while (high > low) {
		high--;
		add_to_free_list(page + (1UL << high), zone, high);
	}
}

static __always_inline struct page *__rmqueue_smallest(struct zone *zone, unsigned int order)
{
	unsigned int o;
	struct page *page;

	for (o = order; o < MAX_ORDER; o++) {
		if (list_empty(&zone->free_area[o]))
			continue;
		page = list_first_entry(&zone->free_area[o], struct page, lru);
		del_page_from_free_list(page);
		expand(zone, page, order, o);
		zone->nr_free -= 1UL << order;
		page->order = order;
		page->flags = 0;
		page->_refcount.counter = 1;
		return page;
	}
	return NULL;
}

static noinline struct page *rmqueue(struct zone *zone, unsigned int order)
{
	unsigned long flags;
	struct page *page;

	spin_lock_irqsave(&zone->lock, flags);
	page = __rmqueue_smallest(zone, order);
	spin_unlock_irqrestore(&zone->lock, flags);
	return page;
}

static noinline void prep_new_page(struct page *page, unsigned int order, gfp_t gfp)
{
	if (gfp & __GFP_ZERO)
		memset(page_address(page), 0, PAGE_SIZE << order);
}

static noinline struct page *get_page_from_freelist(gfp_t gfp, unsigned int order)
{
	struct page *page = rmqueue(&contig_zone, order);

	if (page)
		prep_new_page(page, order, gfp);
	return page;
}

static __cold noinline void warn_alloc(gfp_t gfp, unsigned int order)
{
	if (gfp & __GFP_NOWARN)
		return;
	pr_warn("%s: page allocation failure: order:%u, mode:%#x\n", current->comm, order, gfp);
}

struct page *__alloc_pages(gfp_t gfp, unsigned int order, int preferred_nid __attribute__((unused)),
			   void *nodemask __attribute__((unused)))
{
	struct page *page;

	if (WARN_ON_ONCE(order >= MAX_ORDER))
		return NULL;
	page = get_page_from_freelist(gfp, order);
	if (unlikely(!page))
		warn_alloc(gfp, order);
	trace_mm_page_alloc(page, order, gfp, MIGRATE_UNMOVABLE);
	return page;
}

/* __alloc_pages() that fires no probe: for adopting tasks. */
noinstr struct page *host_alloc_pages(unsigned int order)
{
	unsigned long flags;
	struct page *page;

	local_irq_save(flags);
	host_lock(&contig_zone.lock);
	page = __rmqueue_smallest(&contig_zone, order);
	host_unlock(&contig_zone.lock);
	local_irq_restore(flags);
	return page;
}

static bool page_is_buddy(unsigned long pfn, unsigned int order)
{
	struct page *page;

	if (pfn < min_pfn || pfn >= max_pfn)
		return false;
	page = pfn_to_page(pfn);
	return page->flags & PG_buddy && page->order == order;
}

static noinline void __free_one_page(struct page *page, unsigned long pfn, struct zone *zone,
			    unsigned int order)
{
	unsigned long buddy_pfn;

	zone->nr_free += 1UL << order;
	while (order < MAX_ORDER - 1) {
		buddy_pfn = pfn ^ (1UL << order);
		if (!page_is_buddy(buddy_pfn, order))
			break;
		del_page_from_free_list(pfn_to_page(buddy_pfn));
		pfn &= buddy_pfn;
		order++;
	}
	page = pfn_to_page(pfn);
	page->flags = 0;
	add_to_free_list(page, zone, order);
}

static void free_one_page(struct zone *zone, struct page *page, unsigned int order)
{
	unsigned long flags;

	spin_lock_irqsave(&zone->lock, flags);
	__free_one_page(page, page_to_pfn(page), zone, order);
	spin_unlock_irqrestore(&zone->lock, flags);
}

void __free_pages(struct page *page, unsigned int order)
{
	if (!atomic_dec_and_test(&page->_refcount))
		return;
	trace_mm_page_free(page, order);
	free_one_page(&contig_zone, page, order);
}

void put_page(struct page *page)
{
	__free_pages(page, page->order);
}

unsigned long __get_free_pages(gfp_t gfp, unsigned int order)
{
	struct page *page = alloc_pages(gfp, order);

	return page ? (unsigned long)page_address(page) : 0;
}

unsigned long get_zeroed_page(gfp_t gfp)
{
	return __get_free_pages(gfp | __GFP_ZERO, 0);
}

void free_pages(unsigned long addr, unsigned int order)
{
	if (addr)
		__free_pages(virt_to_page((void *)addr), order);
}

unsigned int get_order(unsigned long size)
{
	unsigned int order = 0;

	while ((PAGE_SIZE << order) < size)
		order++;
	return order;
}

unsigned long nr_free_pages(void)
{
	return contig_zone.nr_free;
}

static __init void memblock_free_all(unsigned long pfn)
{
	unsigned int order;

	while (pfn < max_pfn) {
		order = MAX_ORDER - 1;
		while (pfn & ((1UL << order) - 1) || pfn + (1UL << order) > max_pfn)
			order--;
		__free_one_page(pfn_to_page(pfn), pfn, &contig_zone, order);
		pfn += 1UL << order;
	}
}

__init void mem_init(void)
{
	unsigned long map_bytes;
	int order;

	min_pfn = DIV_ROUND_UP(boot_params.ram_start, PAGE_SIZE);
	max_pfn = boot_params.ram_end >> PAGE_SHIFT;
	map_bytes = (max_pfn - min_pfn) * sizeof(struct page);
	/* The map has pages of frames that are there alone. */
	vmemmap_base = (unsigned long)__va(min_pfn << PAGE_SHIFT) - min_pfn * sizeof(struct page);
	memset(pfn_to_page(min_pfn), 0, map_bytes);
	for (order = 0; order < MAX_ORDER; order++)
		INIT_LIST_HEAD(&contig_zone.free_area[order]);
	memblock_free_all(min_pfn + DIV_ROUND_UP(map_bytes, PAGE_SIZE));
	contig_zone.managed_pages = contig_zone.nr_free;
	totalreserve_pages = contig_zone.managed_pages / 16;
	pr_info("Memory: %luK/%lluK available\n", contig_zone.nr_free * 4, boot_params.ram_end / 1024);
}
