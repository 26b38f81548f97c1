"""Per-instance gradients as factors: their norms, their inner products, and the perturbed outputs they give."""
