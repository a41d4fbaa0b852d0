// SPDX-License-Identifier: GPL-2.0-or-later
// Red-black trees: rebalancing after insertion and removal, and walking in order.
#include "rbtree.h"

#define RB_BLACK 1UL

static __always_inline bool is_black(const struct rb_node *n)
{
	return !n || n->__rb_parent_color & RB_BLACK;
}

static __always_inline void set_black(struct rb_node *n)
{
	n->__rb_parent_color |= RB_BLACK;
}

static __always_inline void set_red(struct rb_node *n)
{
	n->__rb_parent_color &= ~RB_BLACK;
}

static __always_inline void set_parent(struct rb_node *n, struct rb_node *parent)
{
	n->__rb_parent_color = (unsigned long)parent | (n->__rb_parent_color & RB_BLACK);
}

static __always_inline void replace_child(struct rb_node *old, struct rb_node *new,
					  struct rb_node *parent, struct rb_root *root)
{
	if (!parent)
		root->rb_node = new;
	else if (parent->rb_left == old)
		parent->rb_left = new;
	else
		parent->rb_right = new;
}

static void rotate_left(struct rb_node *n, struct rb_root *root)
{
	struct rb_node *right = n->rb_right;

	n->rb_right = right->rb_left;
	if (right->rb_left)
		set_parent(right->rb_left, n);
	set_parent(right, rb_parent(n));
	replace_child(n, right, rb_parent(n), root);
	right->rb_left = n;
	set_parent(n, right);
}

static void rotate_right(struct rb_node *n, struct rb_root *root)
{
	struct rb_node *left = n->rb_left;

	n->rb_left = left->rb_right;
	if (left->rb_right)
		set_parent(left->rb_right, n);
	set_parent(left, rb_parent(n));
	replace_child(n, left, rb_parent(n), root);
	left->rb_right = n;
	set_parent(n, left);
}

/* Node and parent are red, on the parent's inner or outer side; the uncle is black. */
static void insert_rotate(struct rb_node *node, struct rb_node *parent, struct rb_node *gparent,
			  struct rb_root *root)
{
	bool left = parent == gparent->rb_left;

	if (left && node == parent->rb_right) {
		rotate_left(parent, root);
		parent = node;
	} else if (!left && node == parent->rb_left) {
		rotate_right(parent, root);
		parent = node;
	}
	set_black(parent);
	set_red(gparent);
	if (left)
		rotate_right(gparent, root);
	else
		rotate_left(gparent, root);
}

void rb_insert_color(struct rb_node *node, struct rb_root *root)
{
	struct rb_node *parent, *gparent, *uncle;

	while ((parent = rb_parent(node)) && !is_black(parent)) {
		gparent = rb_parent(parent);
		uncle = parent == gparent->rb_left ? gparent->rb_right : gparent->rb_left;
		if (is_black(uncle)) {
			insert_rotate(node, parent, gparent, root);
			break;
		}
		set_black(parent);
		set_black(uncle);
		set_red(gparent);
		node = gparent;
	}
	set_black(root->rb_node);
}

static void erase_color_left(struct rb_node **node, struct rb_node *parent, struct rb_root *root)
{
	struct rb_node *sibling = parent->rb_right;

	if (!is_black(sibling)) {
		set_black(sibling);
		set_red(parent);
		rotate_left(parent, root);
		sibling = parent->rb_right;
	}
	if (is_black(sibling->rb_left) && is_black(sibling->rb_right)) {
		set_red(sibling);
		*node = parent;
		return;
	}
	if (is_black(sibling->rb_right)) {
		set_black(sibling->rb_left);
		set_red(sibling);
		rotate_right(sibling, root);
		sibling = parent->rb_right;
	}
	if (is_black(parent))
		set_black(sibling);
	else
		set_red(sibling);
	set_black(parent);
	set_black(sibling->rb_right);
	rotate_left(parent, root);
	*node = root->rb_node;
}

static void erase_color_right(struct rb_node **node, struct rb_node *parent, struct rb_root *root)
{
	struct rb_node *sibling = parent->rb_left;

	if (!is_black(sibling)) {
		set_black(sibling);
		set_red(parent);
		rotate_right(parent, root);
		sibling = parent->rb_left;
	}
	if (is_black(sibling->rb_left) && is_black(sibling->rb_right)) {
		set_red(sibling);
		*node = parent;
		return;
	}
	if (is_black(sibling->rb_left)) {
		set_black(sibling->rb_right);
		set_red(sibling);
		rotate_left(sibling, root);
		sibling = parent->rb_left;
	}
	if (is_black(parent))
		set_black(sibling);
	else
		set_red(sibling);
	set_black(parent);
	set_black(sibling->rb_left);
	rotate_right(parent, root);
	*node = root->rb_node;
}

static void erase_color(struct rb_node *node, struct rb_node *parent, struct rb_root *root)
{
	while (node != root->rb_node && is_black(node)) {
		if (node == parent->rb_left)
			erase_color_left(&node, parent, root);
		else
			erase_color_right(&node, parent, root);
		parent = node ? rb_parent(node) : NULL;
	}
	if (node)
		set_black(node);
}

/* Puts the successor of a node with two children into its place. */
static bool swap_successor(struct rb_node *node, struct rb_root *root, struct rb_node **child,
			   struct rb_node **parent)
{
	struct rb_node *next = node->rb_right;
	bool black;

	while (next->rb_left)
		next = next->rb_left;
	black = is_black(next);
	*child = next->rb_right;
	*parent = rb_parent(next);
	if (*parent == node) {
		*parent = next;
	} else {
		(*parent)->rb_left = *child;
		if (*child)
			set_parent(*child, *parent);
		next->rb_right = node->rb_right;
		set_parent(next->rb_right, next);
	}
	replace_child(node, next, rb_parent(node), root);
	next->rb_left = node->rb_left;
	set_parent(next->rb_left, next);
	next->__rb_parent_color = node->__rb_parent_color;
	return black;
}

void rb_erase(struct rb_node *node, struct rb_root *root)
{
	struct rb_node *child, *parent;
	bool black;

	if (node->rb_left && node->rb_right) {
		black = swap_successor(node, root, &child, &parent);
	} else {
		child = node->rb_left ? node->rb_left : node->rb_right;
		parent = rb_parent(node);
		black = is_black(node);
		if (child)
			set_parent(child, parent);
		replace_child(node, child, parent, root);
	}
	if (black)
		erase_color(child, parent, root);
}

struct rb_node *rb_first(const struct rb_root *root)
{
	struct rb_node *n = root->rb_node;

	while (n && n->rb_left)
		n = n->rb_left;
	return n;
}

struct rb_node *rb_last(const struct rb_root *root)
{
	struct rb_node *n = root->rb_node;

	while (n && n->rb_right)
		n = n->rb_right;
	return n;
}

struct rb_node *rb_next(const struct rb_node *node)
{
	struct rb_node *parent;

	if (node->rb_right) {
		node = node->rb_right;
		while (node->rb_left)
			node = node->rb_left;
		return (struct rb_node *)node;
	}
	while ((parent = rb_parent(node)) && node == parent->rb_right)
		node = parent;
	return parent;
}

struct rb_node *rb_prev(const struct rb_node *node)
{
	struct rb_node *parent;

	if (node->rb_left) {
		node = node->rb_left;
		while (node->rb_right)
			node = node->rb_right;
		return (struct rb_node *)node;
	}
	while ((parent = rb_parent(node)) && node == parent->rb_left)
		node = parent;
	return parent;
}
