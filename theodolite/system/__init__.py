"""The machine: threads, memory, files, interrupts, and how strings are shown. Nothing here knows of models."""
