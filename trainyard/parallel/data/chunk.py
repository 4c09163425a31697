"""What an optimizer takes: the parameters of a model, or of a chunk of it, and their gradients."""

from __future__ import annotations

from typing import TypeAlias

from trainyard.parallel.data.data_parallel import DataParallel
from trainyard.parallel.data.fully_sharded import FullyShardedPart

Chunk: TypeAlias = DataParallel | FullyShardedPart
