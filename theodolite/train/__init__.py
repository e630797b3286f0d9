"""Training: the small trainer (`tiny.py`), and what a user's own training takes from here."""
