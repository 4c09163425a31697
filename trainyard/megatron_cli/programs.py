"""The table of Megatron-LM's programs: which stage does the work of each, and what it implies. Data
only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainyard.megatron_cli.absent import LATER


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program of Megatron-LM, or of a guide to it."""

    path: str
    """In its repository, with slashes."""
    stage: str = ""
    """The stage that does its work; empty: none does, and `answer` says what to do."""
    implies: tuple[str, ...] = ()
    """Flags and values that it stands for, each unless the command line has the flag."""
    tokenizer_type: str = ""
    """Its default --tokenizer-type."""
    by_task: Mapping[str, str] = field(default_factory=dict)
    """Other stages that do its work, by the value of --task."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Its flags that other programs have for other things, and the flag of the stage that each
    stands for. Without leading dashes."""
    answer: str = ""
    """Without a stage: what to do instead, or that it is not supported yet."""


VISION = "image models are not supported yet"
ENCODERS = ("clip", "internvit", "radio", "siglip")
IMAGE_TASKS = ("ai2d", "chartqa", "coco", "mathvista", "mmmu", "ocrbench", "textvqa", "vqav2")
QUANTIZE = (
    "use stages.quantize, which writes FP8 or INT8 weights for vLLM and transformers "
    "(docs/checkpoints.md)"
)
OTHER_MODELOPT = "pruning, distillation and drafting heads are not supported yet"
TENSORRT = (
    "no TensorRT-LLM engine is built; use stages.reshard --saver hf, whose folder its own "
    "converters read"
)

WORDPIECE, GPT2 = "BertWordPieceLowerCase", "GPT2BPETokenizer"

ANY_MEGATRON = ("--loader", "megatron", "--saver", "megatron")
"""The defaults of the converter."""


def _trains(path: str, model_type: str, tokenizer_type: str) -> Program:
    return Program(
        path=path,
        stage="pretrain",
        implies=("--model-type", model_type),
        tokenizer_type=tokenizer_type,
    )


def _without(answer: str, *paths: str) -> list[Program]:
    return [Program(path=path, answer=answer) for path in paths]


def _dynamic(path: str) -> Program:
    return Program(path=path, stage="benchmark", implies=("--engine-type", "dynamic"))


def _samples(path: str) -> Program:
    """It draws from all tokens unless the command says otherwise."""
    return Program(path=path, stage="generate", implies=("--top-k", "0"))


DETOXIFY = "examples/detxoify_lm"
"""In newer releases below examples/academic_paper_scripts."""
FINETUNE_GPT = f"{DETOXIFY}/finetune_gpt.py"
AS_REALTOXICITYPROMPTS = ("--prompt-key", "prompt.text", "--prompt-format", "jsonl", "--top-k", "0")


def _scores(path: str, *implies: str) -> Program:
    return Program(path=f"{DETOXIFY}/{path}", stage="score", implies=implies)


EXAMPLE = "megatron_core_training_example.py"

PROGRAMS: tuple[Program, ...] = (
    _trains("pretrain_gpt.py", "gpt", GPT2),
    _trains("pretrain_gpt_core.py", "gpt", GPT2),
    _trains("pretrain_gpt2.py", "gpt", GPT2),
    _trains("pretrain_bert.py", "bert", WORDPIECE),
    _trains("pretrain_t5.py", "t5", WORDPIECE),
    _trains("pretrain_t5_core.py", "t5", WORDPIECE),
    _trains("pretrain_retro.py", "retro", ""),
    _trains("pretrain_mamba.py", "mamba", GPT2),
    _trains("pretrain_hybrid.py", "mamba", GPT2),
    Program(path=EXAMPLE, stage="pretrain"),
    Program(path="tools/preprocess_data.py", stage="tokenize"),
    Program(path="tools/preprocess_data_fast.py", stage="tokenize"),
    Program(path="tools/merge_datasets.py", stage="merge"),
    Program(path="tools/checkpoint/convert.py", stage="reshard", implies=ANY_MEGATRON),
    Program(path="tools/checkpoint/util.py", stage="reshard", implies=ANY_MEGATRON),
    Program(path="tools/checkpoint_util.py", stage="reshard", implies=ANY_MEGATRON),
    Program(path="tools/report_theoretical_memory.py", stage="plan"),
    Program(
        path="tasks/main.py",
        stage="evaluate",
        by_task=dict.fromkeys(("RACE", "MNLI", "QQP"), "classify"),
    ),
    Program(path="tools/run_inference_performance_test.py", stage="benchmark"),
    Program(path="examples/inference/gpt/gpt_static_inference.py", stage="generate"),
    Program(path="tools/retro/preprocess_data.py", stage="retro_preprocess"),
    _dynamic("examples/inference/gpt/gpt_dynamic_inference.py"),
    _dynamic("examples/inference/gpt/gpt_dynamic_inference_with_coordinator.py"),
    _dynamic("examples/inference/offline_inference.py"),
    Program(path="examples/inference/gpt/simple_gpt_batch_inference.py", stage="generate"),
    Program(path="examples/inference/gpt/gpt_batch_inference.py", stage="generate"),
    _samples("examples/inference/gpt/generate_mcore_samples_gpt.py"),
    _samples("tools/generate_samples_gpt.py"),
    _samples("tools/generate_samples_gpt2.py"),
    Program(path="examples/inference/launch_inference_server.py", stage="serve"),
    Program(path="tools/run_text_generation_server.py", stage="serve"),
    Program(path="tools/run_dynamic_text_generation_server.py", stage="serve"),
    Program(path="tools/run_mamba_text_generation_server.py", stage="serve"),
    Program(path="tools/text_generation_cli.py", stage="generate"),
    *_without(
        f"training of retrievers {LATER}",
        "pretrain_ict.py",
        "tools/create_doc_index.py",
    ),
    *_without(
        VISION,
        "pretrain_vision_classify.py",
        "pretrain_vision_classification.py",
        "pretrain_vision_dino.py",
        "pretrain_vision_inpaint.py",
        "pretrain_vlm.py",
        "examples/multimodal/train.py",
        "examples/multimodal/run_text_generation.py",
        "examples/multimodal/combine_state_dicts.py",
        *(f"examples/multimodal/model_converter/{name}_converter.py" for name in ENCODERS),
        "examples/multimodal/model_converter/vision_model_tester.py",
        *(f"examples/multimodal/evaluation/evaluate_{name}.py" for name in IMAGE_TASKS),
        "tasks/vision/main.py",
        "examples/mimo/train.py",
        "run_vlm_text_generation.py",
        "tools/run_vlm_text_generation.py",
        "tools/preprocess_mmdata.py",
    ),
    *_without(f"reinforcement learning {LATER}", "train_rl.py"),
    Program(
        path=FINETUNE_GPT,
        stage="pretrain",
        implies=("--model-type", "gpt", "--valid-data-split", "98,2,0"),
        tokenizer_type=GPT2,
        renames={"data-path": "train-data-path", "data-path2": "valid-data-path"},
    ),
    Program(
        path=f"{DETOXIFY}/generate_samples_gpt.py",
        stage="generate",
        implies=(*AS_REALTOXICITYPROMPTS, "--out-seq-length", "1024"),
        renames={"micro-batch-size": "inference-max-requests"},
    ),
    Program(
        path=f"{DETOXIFY}/generate_mcore_samples_gpt.py",
        stage="generate",
        implies=AS_REALTOXICITYPROMPTS,
        renames={"micro-batch-size": "inference-max-requests"},
    ),
    Program(path=f"{DETOXIFY}/perplexity.py", stage="evaluate", implies=("--task", "WIKITEXT103")),
    _scores("annotations/perspective_api_annotate.py"),
    _scores(
        "annotations/filter-selfgeneration.py",
        *("--classifier", "annotated", "--keep-fraction", "0.5"),
    ),
    _scores("perspective_api.py"),
    *_without(
        f"dialogue by prompts in stages {LATER}",
        "tasks/msdp/main.py",
        "tasks/msdp/preprocessing.py",
    ),
    *_without(
        QUANTIZE,
        "examples/post_training/modelopt/quantize.py",
        "examples/deploy/text_generation_ptq.py",
        "examples/export/ptq_and_trtllm_export/text_generation_ptq.py",
        "examples/inference/quantization/text_generation_ptq.py",
    ),
    *_without(
        TENSORRT,
        "examples/deploy/trtllm_text_generation.py",
        "examples/export/ptq_and_trtllm_export/trtllm_text_generation.py",
        "examples/inference/quantization/trtllm_text_generation.py",
        "examples/export/trtllm_export/single_device_export/gpt_single_device_cpu_export.py",
        "examples/export/trtllm_export/distributed_export/gpt_distributed_gpu_export.py",
    ),
    *_without(
        OTHER_MODELOPT,
        "examples/export/knowledge_distillation/pretrain_gpt_modelopt.py",
        "examples/post_training/modelopt/prune.py",
        "examples/post_training/modelopt/train.py",
        "examples/post_training/modelopt/validate.py",
        "examples/post_training/modelopt/offline_feature_extract.py",
    ),
    *_without(
        "use stages.lm_eval --tasks mmlu, which runs lm-evaluation-harness (docs/evaluation.md)",
        "examples/post_training/modelopt/mmlu.py",
    ),
    *_without(
        "use stages.reshard, which converts to and from Hugging Face folders",
        "examples/post_training/modelopt/convert_model.py",
        "examples/post_training/modelopt/export.py",
        "examples/gptoss/01_convert_from_hf.py",
    ),
    *_without(
        "use stages.finetune, on files of conversations (docs/finetune.md)",
        "examples/post_training/modelopt/finetune.py",
    ),
    *_without(
        "use stages.generate, which writes texts for --prompts",
        "examples/post_training/modelopt/generate.py",
    ),
    *_without(
        "use stages.generate, which generates texts with a T5 too (docs/inference.md)",
        "examples/inference/t5/simple_t5_batch_inference.py",
    ),
    Program(path="tools/retro/sft/sft_retro.py", stage="finetune"),
    Program(
        path="tools/retro/text_generation/retro_text_generation.py",
        stage="evaluate",
        implies=("--top-k", "0"),
    ),
    *_without(
        "it has no options, only paths in its source; stages.evaluate --task nq prints the same "
        "lines about the answers that it generates (docs/finetune.md)",
        "tools/retro/text_generation/evaluate.py",
    ),
    *_without(
        "use stages.ensemble, which averages the probabilities that evaluations saved: python -m "
        "stages.ensemble FOLDER OTHER",
        "tasks/ensemble_classifier.py",
    ),
    *_without(
        "use stages.clean --preset openwebtext, which has both programs' rules (docs/collect.md)",
        "tools/openwebtext/cleanup_dataset.py",
        "tools/openwebtext/cleanup_fix_dataset.py",
    ),
    *_without(
        "use stages.dedup, which finds duplicates and removes them in one run (docs/collect.md)",
        "tools/openwebtext/find_duplicates.py",
        "tools/openwebtext/group_duplicate_url.py",
        "tools/openwebtext/remove_group_duplicates.py",
    ),
    *_without(
        "use stages.decontaminate, which has its options (docs/collect.md)",
        "tools/openwebtext/filter_ngrams.py",
    ),
    *_without(
        "use stages.collect --source fetch --url-preset openwebtext, which leaves out the same "
        "URLs and downloads the others (docs/collect.md)",
        "tools/openwebtext/blacklist_urls.py",
    ),
    *_without(
        "not needed: stages.clean reads any number of files of documents, and gives each its "
        "origin (docs/collect.md)",
        "tools/openwebtext/add_id.py",
        "tools/openwebtext/merge_jsons.py",
    ),
    *_without(
        "use tools/checkpoint/convert.py, which joins the files of ranks: python -m "
        "stages.megatron tools/checkpoint/convert.py --load-dir FOLDER --save-dir OTHER",
        "tools/merge_mp_partitions.py",
        "tools/checkpoint/hybrid_conversion.py",
    ),
    *_without(
        f"turning a GPT into a hybrid, or back, {LATER}",
        "tools/checkpoint/gpt_mamba_conversion.py",
        "tools/checkpoint/gpt_hybrid_conversion.py",
    ),
    *_without(
        "use tools/retro/preprocess_data.py, which has its tasks",
        "tools/retro/main.py",
    ),
    *_without(
        "use stages.inspect, which shows the tensors of any checkpoint, or stages.reshard, which "
        "converts them",
        "tools/checkpoint/checkpoint_inspector.py",
    ),
    *_without(
        "use stages.index, which builds the indices of samples before a run",
        "tools/build_sequences_per_dataset.py",
        "tools/prepare_cache.py",
    ),
    *_without("use stages.retro_explore, which looks into a project", "tools/retro/cli"),
    *_without(
        "it is a program to copy from; docs/library.md has a training loop of your own",
        "examples/run_simple_mcore_train_loop.py",
    ),
    *_without(
        "translated pairs of texts have no reader; stages.tokenize reads JSONL and text",
        "tools/preprocess_data_nmt.py",
    ),
)
"""Every program. Of two with one name, the first is the one without its folder."""
