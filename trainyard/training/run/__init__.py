"""The run folder of a training: its steps, where a run resumes, and what it records of itself."""
