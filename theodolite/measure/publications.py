"""The publications that columns, figures and pages name, by their short names."""

from __future__ import annotations

BAO = "Bao et al. 2024"
SONG = "Song & Zhong 2024"
ZHANG = "Zhang et al. 2025"
ZHAI = "Zhai et al. 2023"
XIAO = "Xiao et al. 2024"
OLSSON = "Olsson et al. 2022"
TITLES = {
    BAO: "Self-attention Networks Localize When QK-eigenspectrum Concentrates",
    SONG: "Uncovering hidden geometry in Transformers via disentangling position and context",
    ZHANG: "Attention Sinks and Outlier Features: A ‘Catch, Tag, and Release’ Mechanism for Embeddings",
    ZHAI: "Stabilizing Transformer Training by Preventing Attention Entropy Collapse",
    XIAO: "Efficient Streaming Language Models with Attention Sinks",
    OLSSON: "In-context Learning and Induction Heads",
}
