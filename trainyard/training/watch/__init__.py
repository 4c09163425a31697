"""What watches a training: hangs, memory, replicas that differ, spikes of the loss."""
