"""What is run at a hit, in executable memory of the host's: copies in slots, detours, handlers as guest code.

HitRing is for users; the rest belongs to the engine. What is taken out of use goes to DeferredFree, and is
freed under the control lock, when no CPU and no task can be in it.
"""
