"""Files as small objects, and the trees built of them."""
