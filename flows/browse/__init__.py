"""What lies under the root of a yard, for browsers: read only, and only what pages lead to."""
