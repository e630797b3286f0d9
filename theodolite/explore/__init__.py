"""The page of `theodolite explore`: one head of a model, or of two, on a prompt that one types."""
