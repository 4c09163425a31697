"""A flow run: submits stages, follows, retries and cancels them."""
