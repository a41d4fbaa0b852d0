"""The kernel binary: C source, prebuilt images, and what is read out of them."""
