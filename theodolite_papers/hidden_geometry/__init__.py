"""Song & Zhong 2024, Uncovering hidden geometry in Transformers via disentangling position and context."""
