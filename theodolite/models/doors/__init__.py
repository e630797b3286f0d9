"""How a model is tapped: one file for each way in which models attend."""
