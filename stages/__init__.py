"""What: one package a stage, one container image each; a stage reads artifacts and writes
artifacts."""
