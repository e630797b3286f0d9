"""Logits split by the parts of query and key: of a prompt, over a sample of a text, of heads with a pattern."""
