"""What `stages.megatron` says to each command line of Megatron-LM's scripts and of guides
(tests/golden/megatron_commands.jsonl): it runs, or it is refused with these words.

By the file name of the script, which answers alike in every version, or the name of a guide's
line."""

from __future__ import annotations

RUNS = ""

NO_IMAGES = "image models are not supported yet"
OF_RETRIEVER = "needs the retriever of pretrain_ict.py, which is not supported yet"

UNEVEN = "--num-layers (24) must be divisible by --pipeline-model-parallel-size (16)"
"""Megatron-LM refuses these scripts too, by an assertion."""

NO_PROJECT = "/x/config.json is missing: not the folder of a Retro project"
"""The line has no options of data: they are in the project, and /x has none."""

ANSWERS: dict[str, str] = {
    # training
    "pretrain_gpt.sh": RUNS,
    "pretrain_gpt_distributed.sh": RUNS,
    "pretrain_gpt_distributed_with_mp.sh": RUNS,
    "train_gpt3_175b_distributed.sh": RUNS,
    "train_llama3_8b_h100_fp8.sh": RUNS,
    "train_mixtral_8x7b_distributed.sh": RUNS,
    "pretrain_bert.sh": RUNS,
    "pretrain_bert_distributed.sh": RUNS,
    "pretrain_bert_distributed_with_mp.sh": RUNS,
    "train_bert_340m_distributed.sh": UNEVEN,
    "pretrain_t5.sh": RUNS,
    "pretrain_t5_distributed.sh": RUNS,
    "pretrain_t5_distributed_with_mp.sh": RUNS,
    "train_t5_220m_distributed.sh": RUNS,
    "train_retro_2b_distributed.sh": NO_PROJECT,
    "train.sh": RUNS,
    "pretrain_ict.sh": "pretrain_ict.py: training of retrievers is not supported yet",
    "pretrain_vision_classify.sh": NO_IMAGES,
    "pretrain_vision_dino.sh": NO_IMAGES,
    "pretrain_vision_inpaint.sh": NO_IMAGES,
    "pretrain_vlm.sh": NO_IMAGES,
    # the guide's own program
    "guide-tp": RUNS,
    "guide-tp-full": RUNS,
    "guide-small": RUNS,
    "guide-noargs": RUNS,
    "guide-multi": RUNS,
    "guide-summary": RUNS,
    # data
    "preprocess.sh": RUNS,
    "tok-basic": RUNS,
    "tok-split": RUNS,
    "tok-parts": RUNS,
    "tok-bert": RUNS,
    "tok-gpt2": RUNS,
    "tok-jsonkey": RUNS,
    "tok-ict": RUNS,
    "tok-detx": RUNS,
    "merge": RUNS,
    "merge-mm": RUNS,
    # checkpoints
    "conv-legacy-core": RUNS,
    "conv-default": RUNS,
    "conv-llama-doc": RUNS,
    "conv-megatron": RUNS,
    "conv-bert": RUNS,
    "merge_mp_bert.sh": "use tools/checkpoint/convert.py, which joins the files of ranks",
    # evaluation
    "eval-wiki": RUNS,
    "eval-lambada": RUNS,
    "eval-two": RUNS,
    "evaluate_zeroshot_gpt.sh": RUNS,
    "finetune_mnli_distributed.sh": RUNS,
    "finetune_race_distributed.sh": RUNS,
    "evaluate_retriever_nq.sh": OF_RETRIEVER,
    "finetune_retriever_distributed.sh": OF_RETRIEVER,
    # generation
    "bench-static": RUNS,
    "bench-prompts": RUNS,
    "bench-stream": RUNS,
    "bench-profile": RUNS,
    "bench-dyn": "--top-k 1 and --top-p 0.9 exclude each other",
    "bench-logprobs": RUNS,
    "gpt_dynamic_inference_357m.sh": "give --input-lengths uniform:LOW:HIGH",
    "run_static_inference_llama4_scout.sh": RUNS,
    "run_text_generation_server_345M.sh": RUNS,
    "run_text_generation_server_345M_8_tensor_parallel.sh": RUNS,
    "run_text_generation_llama3.sh": RUNS,
    "run_text_generation_llama3.1.sh": RUNS,
    "run_text_generation_mistral.sh": RUNS,
    "run_text_gen_server_8b.sh": RUNS,
    "run_text_gen_server_8b_gpt3.sh": RUNS,
    # memory
    "plan-basic": RUNS,
    "plan-yaml": "--yaml-cfg: /path/to/config.yaml: there is no such file",
    # detoxification
    "finetune_gpt_distributed-1.3b.sh": RUNS,
    "generate-1.3b.sh": RUNS,
    "selfgenerate-1.3b-unconditional.sh": RUNS,
}

PRINTED: dict[str, tuple[str, ...]] = {
    "train_llama3_8b_h100_fp8.sh": (
        'fp8_format = "hybrid"',
        'fp8_recipe = "delayed"',
        "fp8_amax_history_len = 1024",
        'fp8_amax_compute_algo = "max"',
    ),
}
"""Lines of the options that `--dry-run` prints, of scripts that leave them to Megatron-LM's
defaults."""
