"""Text generation: the KV cache, sampling, and the loop over tokens."""
