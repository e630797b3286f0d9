"""Read texts and images, and cut them into the contexts that a model is measured on."""
