"""Runs the stages of a Retro project in order, under the options of Megatron-LM's
tools/retro/preprocess_data.py. Reads token files and a BERT; writes the project's folder. Each
stage runs as a program of its own in the environment of this one, so its image has what all of
them need."""
