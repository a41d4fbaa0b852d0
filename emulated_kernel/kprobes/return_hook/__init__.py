"""Return hooks: shadow stacks for the return addresses that probing replaces, and who works on them."""
