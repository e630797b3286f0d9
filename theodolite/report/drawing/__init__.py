"""Figures, a file a subject: each function takes a run or plain numbers and draws."""
