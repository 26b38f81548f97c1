"""Per-instance gradients in factors: their norms, their sums, and the perturbed outputs they give."""
