"""A page of a training run that is still going on, from the record that the monitor writes."""
