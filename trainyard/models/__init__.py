"""The networks, their configuration, and what they cost in parameters, arithmetic and memory."""
