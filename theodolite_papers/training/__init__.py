"""What the trainers of the papers share, and the trainer of the embedded model."""
