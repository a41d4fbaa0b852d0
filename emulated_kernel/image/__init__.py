"""The kernel binary: its sources, its build, and the loader that takes an image apart.

What is loaded doesn't change, but for modules.LiveImage, which modules come to and leave under the control
lock; nothing here but linux takes a lock. build.py is a command, and nobody imports it at run time.
"""
