"""Images of kernels: the sources of the built-in kernel (src/), its build, and loaders of kernel files.

Loaded images are immutable, except live_image.LiveImage, whose modules are added and removed under the
control lock. Only the subpackage linux takes locks. build_images is a command, which no module imports at run
time.
"""
