"""Matrix products in 8-bit floating point: scales, casts, products."""
