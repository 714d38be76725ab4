#!/usr/bin/env bash
# From raw conversations, or from nothing but a target, to an evaluated drafter. Interrupted, it goes on where it was.
#   bash run_full_pipeline.sh [prompts.jsonl]       (without prompts the target writes the user turns as well)
# The sizes are for a look at all steps on a laptop, in about ten minutes; for a drafter worth having see the README.
set -euo pipefail
cd "$(dirname "$0")"

prompts="${1:-}"
work="${WORK:-pipeline}"         # everything is written here
target="${TARGET:-}"             # folder or Hub id; the embedded default if empty
conversations="${CONVERSATIONS:-60}" answer="${MAX_NEW_TOKENS:-96}" length="${MAX_SEQ_LEN:-512}" epochs="${EPOCHS:-3}"

[ ! -x .venv/bin/python ] || PATH="$PWD/.venv/bin:$PATH"
mkdir -p "$work"

echo "== 1/5 conversations in the target's own words"
python -m data.generate_data --output "$work/chats.jsonl" ${prompts:+--prompts "$prompts"} \
    ${target:+--target_model "$target"} --num_conversations "$conversations" --max_new_tokens "$answer"

echo "== 2/5 windows and blocks"
[ -e "$work/blocks/manifest.json" ] || python -m data.sequence_packing --input "$work/chats.jsonl" \
    --output "$work/blocks" ${target:+--tokenizer "$target"} --max_seq_len "$length" --eval_fraction 0.1

echo "== 3/5 the target's hidden states"
python -m data.extract_features ${target:+--model_path "$target"} --input "$work/blocks" --output "$work/features"

echo "== 4/5 training"
resume=(); compgen -G "$work/drafter/checkpoint-*" > /dev/null && resume=(--resume_from_checkpoint true)
accelerate launch train_peagle.py --feature_dir "$work/features" ${target:+--target_model "$target"} \
    --output_dir "$work/drafter" --num_epochs "$epochs" --save_every 50 "${resume[@]}" \
    --markov_rank 64 --depth_weights survival --muon --learning_rate 2e-3

echo "== 5/5 evaluation"
python evaluate_peagle.py --drafter "$work/drafter" ${target:+--target "$target"} --per_category 1 \
    --ways stock plain chain auto --max_new_tokens 32 --quiet true --trained_on "$work/chats.jsonl" --eval_fraction 0.1 \
    --output "$work/report.json" --plots "$work/plots"
