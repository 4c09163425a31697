"""How good a model is: protocols, each with the exact definition that its numbers are compared
under."""
