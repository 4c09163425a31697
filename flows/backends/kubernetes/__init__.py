"""A stage as a job of Kubernetes."""
