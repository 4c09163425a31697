"""Kernels of attention and of norms behind one signature each, and the choice between them."""
