"""Evaluation: perplexity on a text, word tasks after examples, and the tasks of lm-eval."""
