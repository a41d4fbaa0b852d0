"""The kernel image: its sources (src/), its build, and the loaders that parse an image.

Loaded images are immutable, except live_image.LiveImage: it gains and loses modules under the control lock.
Only the subpackage linux takes locks. build_images is a command, which nothing imports at run time.
"""
