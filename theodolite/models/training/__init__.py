"""Models that are being trained: found inside wrappers, sharded over ranks, with adapters."""
