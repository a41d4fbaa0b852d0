// SPDX-License-Identifier: GPL-2.0-or-later
// Slab caches and kmalloc: equal objects on pages, free ones linked through themselves.
#include "bug.h"
#include "mm.h"
#include "printk.h"
#include "string.h"
#include "tracepoint.h"

#define KMALLOC_MIN_SHIFT 3
#define KMALLOC_MAX_SHIFT 13
#define NR_KMALLOC (KMALLOC_MAX_SHIFT - KMALLOC_MIN_SHIFT + 1)
#define ZERO_SIZE_PTR ((void *)16)

static struct kmem_cache kmem_cache_boot;
static struct kmem_cache *kmalloc_caches[NR_KMALLOC];
static LIST_HEAD(slab_caches);
static DEFINE_SPINLOCK(slab_list_lock);

static void *get_freepointer(void *object)
{
	return *(void **)object;
}

static void set_freepointer(void *object, void *next)
{
	*(void **)object = next;
}

/* The free list is in the order of addresses, as far as the constructor has run. */
static noinline void setup_slab(struct kmem_cache *s, struct page *slab)
{
	char *start = page_address(slab), *p;
	unsigned int i;

	slab->flags |= PG_slab;
	slab->slab_cache = s;
	slab->inuse = 0;
	slab->freelist = NULL;
	for (i = s->objects; i-- > 0;) {
		p = start + (size_t)i * s->size;
		set_freepointer(p, slab->freelist);
		slab->freelist = p;
	}
}

static noinline struct page *allocate_slab(struct kmem_cache *s, gfp_t gfp)
{
	struct page *slab = alloc_pages(gfp & ~__GFP_ZERO, s->order);

	if (slab)
		setup_slab(s, slab);
	return slab;
}

static void discard_slab(struct kmem_cache *s, struct page *slab)
{
	slab->flags &= ~PG_slab;
	__free_pages(slab, s->order);
}

static void *slab_take(struct kmem_cache *s, struct page *slab)
{
	void *object = slab->freelist;

	slab->freelist = get_freepointer(object);
	slab->inuse++;
	s->nr_objects++;
	if (!slab->freelist)
		list_del_init(&slab->lru);
	return object;
}

static void *___slab_alloc(struct kmem_cache *s, gfp_t gfp)
{
	struct page *slab = allocate_slab(s, gfp);
	unsigned long flags;
	void *object;

	if (!slab)
		return NULL;
	spin_lock_irqsave(&s->lock, flags);
	s->nr_slabs++;
	list_add(&slab->lru, &s->partial);
	object = slab_take(s, slab);
	spin_unlock_irqrestore(&s->lock, flags);
	return object;
}

static __always_inline void *slab_alloc(struct kmem_cache *s, gfp_t gfp)
{
	unsigned long flags;
	void *object = NULL;

	spin_lock_irqsave(&s->lock, flags);
	if (likely(!list_empty(&s->partial)))
		object = slab_take(s, list_first_entry(&s->partial, struct page, lru));
	spin_unlock_irqrestore(&s->lock, flags);
	if (unlikely(!object))
		object = ___slab_alloc(s, gfp);
	if (object && gfp & __GFP_ZERO)
		memset(object, 0, s->object_size);
	if (object && s->ctor)
		s->ctor(object);
	return object;
}

void *kmem_cache_alloc(struct kmem_cache *s, gfp_t gfp)
{
	void *ret = slab_alloc(s, gfp);

	trace_kmem_cache_alloc(_RET_IP_, ret, s, gfp, NUMA_NO_NODE);
	return ret;
}

static void __slab_free(struct kmem_cache *s, struct page *slab, void *object)
{
	unsigned long flags;
	bool was_full, empty;

	spin_lock_irqsave(&s->lock, flags);
	was_full = !slab->freelist;
	set_freepointer(object, slab->freelist);
	slab->freelist = object;
	slab->inuse--;
	s->nr_objects--;
	empty = !slab->inuse && s->nr_slabs > 1;
	if (was_full)
		list_add_tail(&slab->lru, &s->partial);
	if (empty) {
		list_del_init(&slab->lru);
		s->nr_slabs--;
	}
	spin_unlock_irqrestore(&s->lock, flags);
	if (empty)
		discard_slab(s, slab);
}

void kmem_cache_free(struct kmem_cache *s, void *object)
{
	struct page *slab;

	if (!object)
		return;
	slab = virt_to_page(object);
	slab -= (page_to_pfn(slab) & ((1UL << s->order) - 1));
	if (WARN_ON_ONCE(slab->slab_cache != s))
		return;
	trace_kmem_cache_free(_RET_IP_, object, s);
	__slab_free(s, slab, object);
}

static unsigned int calculate_order(unsigned int size)
{
	unsigned int order = 0;

	while (order < 3 && (PAGE_SIZE << order) / size < 8)
		order++;
	return order;
}

static void kmem_cache_open(struct kmem_cache *s, const char *name, unsigned int size,
			    unsigned int align, void (*ctor)(void *))
{
	memset(s, 0, sizeof(*s));
	s->name = name;
	s->object_size = size;
	s->size = ALIGN(max(size, 8U), max(align, 8U));
	s->order = calculate_order(s->size);
	s->objects = (u32)((PAGE_SIZE << s->order) / s->size);
	s->ctor = ctor;
	INIT_LIST_HEAD(&s->partial);
	list_add_tail(&s->list, &slab_caches);
}

struct kmem_cache *kmem_cache_create(const char *name, unsigned int size, unsigned int align,
				     unsigned int flags __attribute__((unused)),
				     void (*ctor)(void *))
{
	struct kmem_cache *s = kmem_cache_alloc(&kmem_cache_boot, GFP_KERNEL);

	if (!s)
		return NULL;
	spin_lock(&slab_list_lock);
	kmem_cache_open(s, name, size, align, ctor);
	spin_unlock(&slab_list_lock);
	return s;
}

/* Gives pages without objects back; returns 0 if nothing is in use any more. */
int kmem_cache_shrink(struct kmem_cache *s)
{
	struct page *slab, *next;
	LIST_HEAD(discard);
	unsigned long flags;

	spin_lock_irqsave(&s->lock, flags);
	list_for_each_entry_safe(slab, next, &s->partial, lru)
		if (!slab->inuse)
			list_move_tail(&slab->lru, &discard);
	spin_unlock_irqrestore(&s->lock, flags);
	list_for_each_entry_safe(slab, next, &discard, lru)
		discard_slab(s, slab);
	return s->nr_slabs != 0;
}

void kmem_cache_destroy(struct kmem_cache *s)
{
	if (!s)
		return;
	if (WARN_ON(kmem_cache_shrink(s)))
		return;
	spin_lock(&slab_list_lock);
	list_del(&s->list);
	spin_unlock(&slab_list_lock);
	kmem_cache_free(&kmem_cache_boot, s);
}

static struct kmem_cache *kmalloc_slab(size_t size)
{
	unsigned int shift = size <= 8 ? 3 : BITS_PER_LONG - (unsigned int)__builtin_clzl(size - 1);

	return kmalloc_caches[shift - KMALLOC_MIN_SHIFT];
}

static noinline void *kmalloc_large(size_t size, gfp_t gfp)
{
	unsigned int order = get_order(size);
	struct page *page;

	if (order >= MAX_ORDER)
		return NULL;
	page = alloc_pages(gfp, order);
	if (!page)
		return NULL;
	page->flags |= PG_large;
	return page_address(page);
}

void *__kmalloc(size_t size, gfp_t gfp)
{
	struct kmem_cache *s;
	void *ret;

	if (unlikely(size > (1UL << KMALLOC_MAX_SHIFT))) {
		ret = kmalloc_large(size, gfp);
		trace_kmalloc(_RET_IP_, ret, size, PAGE_SIZE << get_order(size), gfp, NUMA_NO_NODE);
		return ret;
	}
	if (unlikely(!size))
		return ZERO_SIZE_PTR;
	s = kmalloc_slab(size);
	ret = slab_alloc(s, gfp);
	trace_kmalloc(_RET_IP_, ret, size, s->size, gfp, NUMA_NO_NODE);
	return ret;
}

/* The first page of the block that an object is in. */
static struct page *virt_to_head_page(const void *object)
{
	struct page *page = virt_to_page(object);
	unsigned long pfn = page_to_pfn(page);
	unsigned int order;

	for (order = 0; order <= 3; order++) {
		page = pfn_to_page(ALIGN_DOWN(pfn, 1UL << order));
		if (page->flags & (PG_slab | PG_large) && page->order >= order)
			return page;
	}
	return virt_to_page(object);
}

size_t ksize(const void *object)
{
	struct page *page;

	if (!object || object == ZERO_SIZE_PTR)
		return 0;
	page = virt_to_head_page(object);
	return page->flags & PG_large ? PAGE_SIZE << page->order : page->slab_cache->object_size;
}

void kfree(const void *object)
{
	struct page *page;

	trace_kfree(_RET_IP_, object);
	if (!object || object == ZERO_SIZE_PTR)
		return;
	page = virt_to_head_page(object);
	if (page->flags & PG_large) {
		page->flags &= ~PG_large;
		__free_pages(page, page->order);
		return;
	}
	if (WARN_ON_ONCE(!(page->flags & PG_slab)))
		return;
	__slab_free(page->slab_cache, page, (void *)object);
}

void *krealloc(const void *p, size_t new_size, gfp_t gfp)
{
	size_t old = ksize(p);
	void *ret;

	if (!new_size) {
		kfree(p);
		return ZERO_SIZE_PTR;
	}
	if (p && old >= new_size)
		return (void *)p;
	ret = __kmalloc(new_size, gfp);
	if (ret && p) {
		memcpy(ret, p, old);
		kfree(p);
	}
	return ret;
}

static const char *const kmalloc_names[NR_KMALLOC] = {
	"kmalloc-8", "kmalloc-16", "kmalloc-32", "kmalloc-64", "kmalloc-128", "kmalloc-256",
	"kmalloc-512", "kmalloc-1k", "kmalloc-2k", "kmalloc-4k", "kmalloc-8k",
};

__init void kmem_cache_init(void)
{
	int i;

	kmem_cache_open(&kmem_cache_boot, "kmem_cache", sizeof(struct kmem_cache), 8, NULL);
	for (i = 0; i < NR_KMALLOC; i++)
		kmalloc_caches[i] = kmem_cache_create(kmalloc_names[i],
						      1U << (KMALLOC_MIN_SHIFT + i), 8, 0, NULL);
}
