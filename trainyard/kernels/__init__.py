"""GPU kernels in Triton, each with the torch function that it replaces named in its docstring. They
are imported where a tensor is on a GPU, never on a machine without one."""
