"""Load tests of servers and engines: requests as users send them, and what each of them met."""
