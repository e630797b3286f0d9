"""Texts: documents, the contexts cut from them, corpora by name, and two tasks with texts of their own."""
