"""Kernels of attention behind one signature, and the choice between them."""
