"""Statistics of one pass over a corpus: update, merge, state, restore. No model and no table is known here."""
