from stages.runtime.cli import stage_main
from stages.train_tokenizer.config import TrainTokenizerConfig

raise SystemExit(stage_main("train_tokenizer", TrainTokenizerConfig, "stages.train_tokenizer.run"))
