"""The emulated PC that a distribution's kernel runs on: CPU, RAM, devices and clock."""
