"""The emulated machines that a distribution's kernel runs on: CPU, RAM, devices and clock."""
