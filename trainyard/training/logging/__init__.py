"""Where the figures of a run go: console, files, TensorBoard, Weights & Biases."""
