"""What is of the machine and not of models: threads, memory, files, interrupts, how strings are shown."""
