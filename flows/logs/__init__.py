"""Output of jobs, line by line, and the console of a flow."""
