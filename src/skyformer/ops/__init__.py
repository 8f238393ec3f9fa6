"""The numerical operations that the attentions are made of: kernels, kernel products, the landmark solve, precision."""
