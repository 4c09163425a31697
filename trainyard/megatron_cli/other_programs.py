"""Flags of other times and other programs. Data only. Rows as in `absent`.

Every program of Megatron-LM takes flags of programs for other models, which alone do something with
them."""

from __future__ import annotations

from trainyard.megatron_cli.absent import LATER

OLDER: tuple[tuple[str, str], ...] = (
    (
        "give --recompute-granularity full with --recompute-method and --recompute-num-layers",
        "activations-checkpoint-method activations-checkpoint-num-layers",
    ),
)
"""Flags that releases before 0.7 have, and none after."""

OTHER_PROGRAMS: tuple[tuple[str, str], ...] = (
    (
        f"it is an option of pretrain_ict.py and of retrievers, whose training {LATER}; leave it "
        "out",
        """
        retriever-* ict-* biencoder-* titles-data-path query-in-block-prob use-one-sent-docs
        evidence-data-path block-data-path embedding-path indexer-* bert-load
        """,
    ),
    (
        "it is an option of pretrain_vision_classify.py, pretrain_vision_dino.py, "
        f"pretrain_vision_inpaint.py and pretrain_vlm.py, whose training {LATER}; leave it out",
        """
        num-classes img-h img-w num-channels patch-dim classes-fraction data-per-class-fraction
        head-lr-mult vision-pretraining-type vision-backbone-type swin-* mask-type mask-factor
        iter-per-epoch dino-* mrope-section
        """,
    ),
    (
        "it is an option of tools/retro/preprocess_data.py, which embeds chunks; leave it out",
        "bert-embedder-type output-bert-embeddings retro-return-doc-ids",
    ),
)

DEFAULTS: dict[str, tuple[str, ...]] = {
    "data-impl": ("mmap", "infer"),
    "retriever-seq-length": ("256",),
    "biencoder-projection-dim": ("0",),
    "query-in-block-prob": ("0.1",),
    "indexer-batch-size": ("128",),
    "indexer-log-interval": ("1000",),
    "num-classes": ("1000",),
    "img-h": ("224",),
    "img-w": ("224",),
    "num-channels": ("3",),
    "patch-dim": ("16",),
    "classes-fraction": ("1", "1.0"),
    "data-per-class-fraction": ("1", "1.0"),
    "head-lr-mult": ("1", "1.0"),
    "vision-pretraining-type": ("classify",),
    "vision-backbone-type": ("vit",),
    "swin-backbone-type": ("tiny",),
    "mask-type": ("random",),
    "mask-factor": ("1", "1.0"),
    "iter-per-epoch": ("1250",),
    "dino-local-img-size": ("96",),
    "dino-local-crops-number": ("10",),
    "dino-head-hidden-size": ("2048",),
    "dino-bottleneck-size": ("256",),
    "dino-freeze-last-layer": ("1",),
    "dino-warmup-teacher-temp": ("0.04",),
    "dino-teacher-temp": ("0.07",),
    "dino-warmup-teacher-temp-epochs": ("30",),
    "bert-embedder-type": ("megatron",),
}
"""Their defaults, which files of options have: they ask for nothing."""
