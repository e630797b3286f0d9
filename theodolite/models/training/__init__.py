"""Models that are being trained: sharded over ranks, with adapters."""
