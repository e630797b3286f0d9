"""The papers' toy models: their sizes, their tasks, and one trainer."""
