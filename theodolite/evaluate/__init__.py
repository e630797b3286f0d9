"""Evaluation: perplexity on a text, the offline few-shot task, and the tasks of lm-eval."""
