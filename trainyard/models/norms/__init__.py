"""Kernels of norms behind one signature, and the choice between them."""
