"""Text generation over HTTP: requests of clients on an engine, and the interfaces that they use."""
