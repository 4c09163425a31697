"""`python -m flows.register --yard NAME`: a server is told all that a yard needs, in one go."""
