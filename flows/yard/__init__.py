"""What a site is: its profile, as a file and as a server knows it, and what its pages link to."""
