"""Writes a checkpoint as a Hugging Face folder with weights in 8 bits, for vLLM and others.

Reads: a checkpoint of any format that `reshard` reads, and a text to measure the loss on. Writes: a
folder with safetensors files, config.json, the tokenizer, and quantization.json. Image: cpu or
cuda."""
