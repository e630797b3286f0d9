"""Work that takes longer than seconds: stages with steps, saved as they go and resumed after an interrupt."""
