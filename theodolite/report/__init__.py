"""The report of a run: sentences, figures, one page that opens from disk. It never sees a model or a text."""
