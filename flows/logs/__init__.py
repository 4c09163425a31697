"""What jobs write, line by line, and what a person sees of it while a flow runs."""
