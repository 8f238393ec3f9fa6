"""Numerical operations behind the attentions: kernels, kernel products, the landmark solve, noise, precision."""
