"""Checks of the engine against autograd on first use, and the errors they raise."""
