#!/bin/bash
# Runs benchmarks/architectures.py for each model in a process of its own, so that no memory of another one counts.
# Usage: each_architecture.sh FOLDER COMMIT SECONDS SEED MODEL... ; one record for each model goes to FOLDER.
set -u
folder=$1 commit=$2 seconds=$3 seed=$4
shift 4
for model in "$@"; do
    timeout "$seconds" python3 "$(dirname "$0")/architectures.py" --model "$model" --commit "$commit" --seed "$seed" \
        --json "$folder/$model.json" 2>&1 | grep -v -i "warn\|transformers\]"
done
