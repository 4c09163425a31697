"""What every stage runs on: its command line, its context, the decision, its ranks and its end."""
