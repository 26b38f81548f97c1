"""One training step: its passes, moving the weights, gradients, randomness, batches, precision and checks."""
