"""The profile of a site, from a file or a Prefect server, and the links of its pages."""
