"""Dealing with the machine, not with models: threads, memory, files, interrupts, how strings are shown."""
