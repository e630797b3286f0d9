"""Zhang, Khan & Papyan 2025, Attention sinks and outlier features: a catch, tag, and release mechanism."""
