"""The table of stages that a flow can start."""

from __future__ import annotations

from typing import Any

from stages.benchmark.config import BenchmarkConfig
from stages.blame.config import BlameConfig
from stages.certify.config import CertifyConfig
from stages.clean.config import CleanConfig
from stages.collect.config import CollectConfig
from stages.datasheet.config import DatasheetConfig
from stages.decontaminate.config import DecontaminateConfig
from stages.dedup.config import DedupConfig
from stages.evaluate.config import EvaluateConfig
from stages.faiss_add.config import FaissAddConfig
from stages.faiss_query.config import FaissQueryConfig
from stages.faiss_train.config import FaissTrainConfig
from stages.generate.config import GenerateConfig
from stages.index.config import IndexConfig
from stages.inspect.config import InspectConfig
from stages.merge.config import MergeConfig
from stages.mix.config import MixConfig
from stages.parity.config import ParityConfig
from stages.plan.config import PlanConfig
from stages.pretrain.config import PretrainConfig
from stages.quantize.config import QuantizeConfig
from stages.report.config import ReportConfig
from stages.reshard.config import ReshardConfig
from stages.retro_db.config import RetroDbConfig
from stages.retro_embed.config import RetroEmbedConfig
from stages.retro_explore.config import RetroExploreConfig
from stages.retro_export.config import RetroExportConfig
from stages.retro_import.config import RetroImportConfig
from stages.retro_preprocess.config import RetroPreprocessConfig
from stages.score.config import ScoreConfig
from stages.serve.config import ServeConfig
from stages.tokenize.config import TokenizeConfig
from stages.train_tokenizer.config import TrainTokenizerConfig
from stages.verify.config import VerifyConfig

CONFIGS: dict[str, type[Any]] = {
    "benchmark": BenchmarkConfig,
    "blame": BlameConfig,
    "certify": CertifyConfig,
    "clean": CleanConfig,
    "collect": CollectConfig,
    "datasheet": DatasheetConfig,
    "decontaminate": DecontaminateConfig,
    "dedup": DedupConfig,
    "evaluate": EvaluateConfig,
    "faiss_add": FaissAddConfig,
    "faiss_query": FaissQueryConfig,
    "faiss_train": FaissTrainConfig,
    "generate": GenerateConfig,
    "index": IndexConfig,
    "inspect": InspectConfig,
    "merge": MergeConfig,
    "mix": MixConfig,
    "parity": ParityConfig,
    "plan": PlanConfig,
    "pretrain": PretrainConfig,
    "report": ReportConfig,
    "quantize": QuantizeConfig,
    "reshard": ReshardConfig,
    "retro_db": RetroDbConfig,
    "retro_embed": RetroEmbedConfig,
    "retro_explore": RetroExploreConfig,
    "retro_export": RetroExportConfig,
    "retro_import": RetroImportConfig,
    "retro_preprocess": RetroPreprocessConfig,
    "score": ScoreConfig,
    "serve": ServeConfig,
    "tokenize": TokenizeConfig,
    "train_tokenizer": TrainTokenizerConfig,
    "verify": VerifyConfig,
}
"""Every stage that a flow can start, with the class of its options."""
