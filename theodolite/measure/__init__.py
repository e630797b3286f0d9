"""From statistics and weights to tables and arrays. No model and no corpus is known here."""
