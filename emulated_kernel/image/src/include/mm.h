/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Pages, the page allocator and the slab caches above it. */
#ifndef _MM_H
#define _MM_H

#include "list.h"
#include "spinlock.h"
#include <asm/page.h>

#include "gfp.h"

#define NUMA_NO_NODE (-1)
#define MIGRATE_UNMOVABLE 0

#define MAX_ORDER 11
#define PG_buddy 1U
#define PG_slab 2U
#define PG_large 4U

struct kmem_cache;

struct page {
	u32 flags;
	atomic_t _refcount;
	struct list_head lru;
	struct kmem_cache *slab_cache;
	void *freelist;
	u32 inuse;
	u32 order;
	unsigned long index;
};

struct zone {
	spinlock_t lock;
	struct list_head free_area[MAX_ORDER];
	unsigned long nr_free;
	unsigned long managed_pages;
};

extern unsigned long vmemmap_base;
extern unsigned long min_pfn, max_pfn;
extern unsigned long totalreserve_pages;
extern atomic_t nr_file_pages;
extern struct zone contig_zone;

/* Where the page of frame 0 would be; macros, for formats of events show what they become. */
#define vmemmap ((struct page *)vmemmap_base)
#define pfn_to_page(pfn) (vmemmap + (pfn))

static __always_inline unsigned long page_to_pfn(const struct page *page)
{
	return (unsigned long)(page - vmemmap);
}

static __always_inline void *page_address(const struct page *page)
{
	return __va(page_to_pfn(page) << PAGE_SHIFT);
}

static __always_inline struct page *virt_to_page(const void *addr)
{
	return pfn_to_page(__pa(addr) >> PAGE_SHIFT);
}

/* Whether the user's files may grow by so many pages: the last ones are for the kernel itself. */
static __always_inline bool file_pages_left(unsigned long pages)
{
	return contig_zone.nr_free >= totalreserve_pages + pages;
}

void mem_init(void);
struct page *__alloc_pages(gfp_t gfp, unsigned int order, int preferred_nid, void *nodemask);
void __free_pages(struct page *page, unsigned int order);
unsigned long __get_free_pages(gfp_t gfp, unsigned int order);
unsigned long get_zeroed_page(gfp_t gfp);
void free_pages(unsigned long addr, unsigned int order);
unsigned int get_order(unsigned long size);
unsigned long nr_free_pages(void);
struct page *host_alloc_pages(unsigned int order);
void put_page(struct page *page);
#define alloc_pages(gfp, order) __alloc_pages(gfp, order, 0, NULL)
#define alloc_page(gfp) alloc_pages(gfp, 0)
#define free_page(addr) free_pages(addr, 0)

struct kmem_cache {
	spinlock_t lock;
	u32 size;
	u32 object_size;
	u32 order;
	u32 objects;           /* per slab */
	struct list_head partial;
	unsigned long nr_slabs;
	unsigned long nr_objects;
	void (*ctor)(void *object);
	const char *name;
	struct list_head list;
};

void kmem_cache_init(void);
struct kmem_cache *kmem_cache_create(const char *name, unsigned int size, unsigned int align,
				     unsigned int flags, void (*ctor)(void *));
void *kmem_cache_alloc(struct kmem_cache *s, gfp_t gfp);
void kmem_cache_free(struct kmem_cache *s, void *object);
int kmem_cache_shrink(struct kmem_cache *s);
void kmem_cache_destroy(struct kmem_cache *s);
void *__kmalloc(size_t size, gfp_t gfp);
void kfree(const void *object);
void *krealloc(const void *p, size_t new_size, gfp_t gfp);
size_t ksize(const void *object);
#define kmalloc(size, gfp) __kmalloc(size, gfp)
#define kzalloc(size, gfp) __kmalloc(size, (gfp) | __GFP_ZERO)
#define kcalloc(n, size, gfp) __kmalloc((n) * (size), (gfp) | __GFP_ZERO)
#define kmem_cache_zalloc(s, gfp) kmem_cache_alloc(s, (gfp) | __GFP_ZERO)

#endif
