"""Every word of Megatron-LM's retro_generate.sh means the same to stages.evaluate, or is ignored
with the true reason; so does every word of its sft_retro_lm.sh to a tuning."""

from __future__ import annotations

import pytest

from tests.stages.directly import run_program
from tests.trainyard.megatron_cli.test_tools import KNOWN, PRETRAIN, ours
from trainyard.errors import ConfigError
from trainyard.megatron_cli.command import understand
from trainyard.megatron_cli.implied import implied
from trainyard.megatron_cli.program_lookup import find_program

PROGRAM = "tools/retro/text_generation/retro_text_generation.py"

WORDS = {
    "--task nq": "--task nq",
    "--task tqa": "--task triviaqa",
    "--top_k 1": "--top-k 1",
    "--greedy": "--top-k 1",
    "--greedy --top_k 1 --top_p 0.0": "--top-k 1 --top-p 0.0",
    "--top_p 0.9": "--top-p 0.9 --top-k 0",
    "--top_p 0.9 --top_k 0": "--top-p 0.9 --top-k 0",
    "--top_p 0.0": "--top-p 0.0",
    "--task tqa --data-folder d/ --split test": "--task triviaqa --valid-data d/tqa/test.json",
    "--split dev --data_folder d --task nq": "--valid-data d/nq/dev.json --task nq",
    "--sample-input-file d/nq/test.json": "--valid-data d/nq/test.json",
    "--sample-output-file c/out.txt": "--output-dir c/out.txt",
    "--gen-start-idx 5 --num-gen 20": "--gen-start-idx 5 --num-gen 20",
    "--load c --ckpt-step 1000": "--load c/iter_0001000",
    "--ft_neighbours 5": "--ft-neighbours 5",
    "--use-retrieved-neighbours": "--use-retrieved-neighbours",
    "--retro-attention-gate 0 --length-penalty 1.0": "",
}


@pytest.mark.parametrize(("line", "expected"), WORDS.items())
def test_a_word_means_the_same(line: str, expected: str) -> None:
    assert ours("evaluate", line) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        *(
            (line, "answered by the decoder alone")
            for line in (
                *("--K 2", "--retro-num-neighbors 2", "--reuse-top", "--retro-add-retriever"),
                *("--retro-workdir w", "--retro-project-dir w"),
            )
        ),
        ("--answer-loss-only", "only the answers are generated"),
        ("--eod-mask-loss", "only the answers are generated"),
        ("--num-samples 0", "retro_text_generation.py does not use it either"),
        ("--split 98,2,0", "it only applies with --data-folder"),
        ("--bf16", "scores are computed in fp32"),
        ("--clip-grad 1.0", "it only applies to training"),
    ],
)
def test_a_word_without_effect_says_the_true_reason(line: str, reason: str) -> None:
    said = understand(line.split(), KNOWN["evaluate"], {})
    assert said.arguments == []
    assert said.remarks[0].startswith(f"{line.split()[0]}: ignored: ")
    assert reason in said.remarks[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--greedy --top_p 0.9", "--greedy takes the likeliest token, and --top_p 0.9 draws one"),
        ("--greedy --top_k 40", "and --top_k 40 draws one; give one of them"),
        ("--data-folder d --task nq", "needs --split: the questions are in FOLDER/TASK/SPLIT.json"),
        ("--data-folder d --split test", "has a folder for each task; give --task too"),
        ("--retro-attention-gate 1", "the encoder takes no part in an answer"),
        ("--beam-search", "answers are greedy or sampled"),
    ],
)
def test_words_that_would_change_the_answers_are_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours("evaluate", line)


def test_the_program_samples_from_all_tokens_unless_told_otherwise() -> None:
    program = find_program(PROGRAM)
    assert implied(program, ["--top_p", "0.9"], {})[1] == ["--top-k", "0"]
    assert implied(program, ["--greedy"], {})[1] == []
    assert implied(program, ["--top_k", "1"], {})[1] == []


def test_programs_of_instruct_retro_have_a_stage_or_an_answer() -> None:
    assert find_program("sft_retro.py").stage == "finetune"
    assert "stages.evaluate" in find_program("text_generation/evaluate.py").answer


@pytest.mark.slow
def test_the_command_of_the_script_runs() -> None:
    line = (
        "--untie-embeddings-and-output-weights --disable-bias-linear --no-position-embedding "
        "--use-rotary-position-embeddings --rotary-percent 0.5 --swiglu --num-layers 24 "
        "--hidden-size 1024 --num-attention-heads 16 --seq-length 4096 "
        "--max-position-embeddings 4096 --lr-decay-style cosine --clip-grad 1.0 --bf16 --top_k 1 "
        "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model t.model --load c "
        "--gen-start-idx 0 --num-gen 20000 --ckpt-step 1000 --sample-input-file d/nq/test.json "
        "--sample-output-file c/retro-generate-nq_5_2_843m_test_greedy_0_20000_1000.txt "
        "--retro-workdir w --retro-add-retriever --retro-num-neighbors 2 --reuse-top "
        "--retro-attention-gate 0 --use-retrieved-neighbours --micro-batch-size 1 --eod-mask-loss "
        "--answer-loss-only --ft_neighbours 5 --task nq"
    )
    done = run_program("stages.megatron", PROGRAM, *line.split(), "--dry-run")
    assert done.status == 0, done.err
    assert 'load = "c/iter_0001000"' in done.out
    assert 'valid_data = [ "d/nq/test.json", ]' in " ".join(done.out.split())


# --- tuning, by sft_retro_lm.sh ---------------------------------------------------------------

TUNING = (
    "--apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear "
    "--no-position-embedding --use-rotary-position-embeddings --rotary-percent 0.5 --swiglu "
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 4096 "
    "--max-position-embeddings 4096 --tokenizer-type GPTSentencePieceTokenizer "
    "--tokenizer-model t.model --bf16 --use-distributed-optimizer --retro-workdir w "
    "--retro-add-retriever --retro-num-neighbors 2 --retro-attention-gate 0 "
    "--data-path 1.0 open_inst --data-folder d --recompute-activations --lr 5e-6 "
    "--micro-batch-size 1 --global-batch-size 128 --min-lr 5e-6 --retro-cyclic-train-iters 1000 "
    "--train-iters 700 --dataloader-type cyclic --save s --eod-mask-loss --answer-loss-only "
    "--ft_neighbours 1 --task none --load c --finetune --no-load-rng --no-load-optim"
)


def test_the_tuning_of_the_script_is_as_long_as_its_cyclic_iterations() -> None:
    said = understand(TUNING.split(), PRETRAIN, {})
    words = " ".join(said.arguments)
    assert "--train-iters 1000" in words
    assert "--train-iters 700" not in words
    assert "--lr-decay-iters 700" in words, "the scheduler there is made of --train-iters"
    assert "--train-data-path 1.0 d/open_inst/open_inst_QA_train.json" in words
    assert not {"--retro-project-dir", "--retro-workdir"} & set(said.arguments)
    assert any(line.startswith("--retro-workdir: ignored: ") for line in said.remarks)
    assert "--retro-cyclic-train-iters: the same as --train-iters 1000" in said.remarks


def test_cyclic_iterations_are_of_the_cyclic_order_alone() -> None:
    once = understand(["--retro-cyclic-train-iters", "5", "--train-iters", "3"], PRETRAIN, {})
    assert once.arguments == ["--train-iters", "3"]
    cyclic = "--retro-cyclic-train-iters 5 --dataloader-type cyclic --retro-project-dir p"
    with pytest.raises(ConfigError, match="give its length as --train-iters, here and to faiss"):
        understand(cyclic.split(), PRETRAIN, {})


@pytest.mark.parametrize("decay", ["--lr-decay-iters 50", "--lr-decay-samples 50"])
def test_a_decay_that_is_given_stays(decay: str) -> None:
    words = " ".join(understand([*TUNING.split(), *decay.split()], PRETRAIN, {}).arguments)
    assert words.count("--lr-decay") == 1
    assert decay in words


@pytest.mark.parametrize("data", ["--data-folder d --data-path nq", "--mock-data"])
def test_cyclic_iterations_without_a_project_are_ignored(data: str) -> None:
    cyclic = f"{data} --train-iters 3 --retro-cyclic-train-iters 5 --dataloader-type cyclic"
    said = understand(cyclic.split(), PRETRAIN, {})
    words = " ".join(said.arguments)
    assert "--train-iters 3" in words
    assert "--lr-decay-iters" not in words
    ignored = "--retro-cyclic-train-iters: ignored: it only applies with --retro-project-dir"
    assert ignored in said.remarks


def test_a_project_counts_wherever_it_stands() -> None:
    behind = f"{TUNING.replace('--retro-workdir w ', '')} --retro-project-dir w"
    assert "--train-iters 1000" in " ".join(understand(behind.split(), PRETRAIN, {}).arguments)
