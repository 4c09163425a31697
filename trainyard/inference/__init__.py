"""Generation: what to remember, which token to take, and the loop between them."""
