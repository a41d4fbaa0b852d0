"""What ends a run of the guest: Trap, and the errors that the machine raises. Everybody may import it.

Nothing else is here, and nothing of it has state: no lock.
"""
