"""trainyard: the library. No orchestrator and no cluster; usable from a notebook or torchrun."""
