"""Joints between the layers: what one part asks for, answered by the parts below it."""
