"""GPU kernels in Triton, each with the torch function that it replaces, if any, in its docstring.

Their modules are imported where a tensor is on a GPU and Triton is there (`available`)."""
